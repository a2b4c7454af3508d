"""The argument ``filter`` of ``convert``: which layers it takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from tritonfp8.conversion.selection.choice import check_patterns, names_part, why_skipped
from tritonfp8.conversion.selection.cost import why_slower, why_slower_block
from tritonfp8.conversion.selection.roles import Roles
from tritonfp8.layers.moe import class_of_experts
from tritonfp8.recipes import Recipe
from tritonfp8.specs.checks import require_int, shown

MIN_FEATURES = 16
AUTO = "auto"

Filter = Callable[[nn.Module, str], bool] | Collection[str] | str


class Selection:
    """Whether a layer is converted, by the argument ``filter``.

    A function decides by itself. Otherwise small layers are left out, and layers with a role, such as output heads
    (:mod:`.roles`), unless a pattern names them; patterns of ``filter`` leave out what none of them matches, and
    ``"auto"`` what would get slower.

    Raises:
        ValueError: another str than ``"auto"``, a pattern list without patterns, or ``tokens`` below 1.
        TypeError: an argument of another type.
    """

    def __init__(self, model: nn.Module, filter: Filter | None, tokens: int) -> None:
        _check(filter, tokens)
        self.function = filter if callable(filter) else None
        self.is_auto = isinstance(filter, str)
        self.patterns = None if filter is None or callable(filter) or self.is_auto else tuple(filter)
        self.used: set[str] = set()
        # The layers that "auto" leaves out.
        self.slower: set[str] = set()
        self.tokens = tokens
        self.roles = Roles(model)

    def reason(self, name: str, layer: Any, sizes: tuple[int, int], found: tuple[str, Recipe] | None) -> str | None:
        """The reason why a layer is not converted, or None.

        Args:
            name: its fully qualified name.
            layer: a linear layer, or a module of experts.
            sizes: its in and out features; of experts the features outside and inside.
            found: the pattern and the recipe that match its name.
        """
        if self.function is not None or (self.patterns is not None and not self.matching(name)):
            return self.left_out(name, layer)
        matching = self.matching(name)
        if small := _small(sizes):
            return small
        role = self.roles.of(name, layer, *sizes)
        naming = [*matching, *([found[0]] if found else [])]
        if role is not None and not any(names_part(pattern, role.part) for pattern in naming):
            return role.reason(name)
        if self.is_auto and class_of_experts(layer) is not None:
            return 'experts: filter="auto" cannot tell whether they get slower: leave it out, or give patterns'
        if self.is_auto and found is not None:
            reason = why_slower(found[1], self.tokens, sizes, layer.weight.device)
            self.slower.update([name] if reason else [])
            return reason
        return None

    def blocks(self, names: Iterable[str]) -> list[list[str]]:
        """For ``"auto"`` the names by block: layers that agree up to the first number are of one block."""
        found: dict[str, list[str]] = {}
        for name in names if self.is_auto else ():
            parts = name.split(".")
            number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
            found.setdefault(".".join(parts[: number + 1]), []).append(name)
        return list(found.values())

    def why_slower_block(
        self, sizes: Mapping[str, tuple[int, int]], recipes: Mapping[str, Recipe], device: torch.device
    ) -> str | None:
        """The reason why a block, of layers of these sizes, would wait for the host, or None."""
        reason = why_slower_block([(recipes[name], size) for name, size in sizes.items()], self.tokens, device)
        self.slower.update(sizes if reason else ())
        return reason

    def matching(self, name: str) -> list[str]:
        """The patterns of the filter that match a name; they count as used."""
        matching = [pattern for pattern in self.patterns or () if fnmatchcase(name, pattern)]
        self.used.update(matching)
        return matching

    def left_out(self, name: str, module: nn.Module) -> str | None:
        """The reason why a function or the patterns of the filter leave out a module of any kind, or None."""
        if self.function is not None:
            return None if self.function(module, name) else "the filter returned False"
        matches = self.patterns is None or self.matching(name)
        return None if matches else "no pattern of the filter matches it"

    def keeps(self, name: str, layer: Any, sizes: tuple[int, int]) -> bool:
        """Whether the layer has a role for which it stays in high precision by default."""
        return self.function is None and self.roles.of(name, layer, *sizes) is not None

    def check_all_used(self, skipped: Mapping[str, str] = MappingProxyType({})) -> None:
        """Raise ValueError if a pattern of the filter matches no layer, with the reasons of ``skipped`` ones."""
        if unused := [pattern for pattern in self.patterns or () if pattern not in self.used]:
            raise ValueError(
                f"the patterns {', '.join(map(repr, unused))} of the filter match no linear layer and no experts"
                f"{why_skipped(unused, skipped)}"
            )


def _small(sizes: tuple[int, int]) -> str | None:
    names = zip(("in_features", "out_features"), sizes, strict=True)
    small = [f"{name}={size}" for name, size in names if size < MIN_FEATURES]
    return f"{' and '.join(small)} below {MIN_FEATURES}" if small else None


def _check(filter: object, tokens: object) -> None:
    require_int("tokens", tokens, 1)
    if filter is None or callable(filter):
        return
    if isinstance(filter, str):
        if filter != AUTO:
            raise ValueError(f'filter must be "auto" if it is a str; got {shown(filter)}. For a pattern give a list')
    elif isinstance(filter, list | tuple | set | frozenset):
        check_patterns(filter)
        if not filter:
            raise ValueError("the filter has no patterns: name at least one")
    else:
        raise TypeError(
            'filter must be a function of a module and its name, a list of patterns, "auto" or None; got '
            f"{type(filter).__name__}"
        )
