"""The blocks and layers of a model, alike ones together, and a shorter model with one block of each kind."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tritonfp8.conversion import linears, sizes_of
from tritonfp8.layers.moe import class_of_experts
from tritonfp8.specs.naming import pattern_of, repeated

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
# Attributes that say where a block stands, and not what it computes.
_PLACE = re.compile(r"(layer|block|depth)_?(idx|id|index|number)?|index|training")


@dataclass(frozen=True)
class BlockKind:
    """Blocks of a model that differ in their weights only.

    Attributes:
        names: of these blocks in the model, in order.
        kept: how many of them, the first ones, the shorter model has.
    """

    names: tuple[str, ...]
    kept: int

    @property
    def label(self) -> str:
        """``model.layers.* (32x)``."""
        return repeated((name, None) for name in self.names)[0].label

    @property
    def left_out(self) -> int:
        """How many of them the shorter model lacks."""
        return len(self.names) - self.kept


@dataclass(frozen=True)
class Shortened:
    """A model in which the lists of blocks end with the first block of the last kind.

    Attributes:
        model: a copy with weights of its own.
        kinds: the kinds of blocks that the uncut model has; empty if it repeats none.
    """

    model: nn.Module
    kinds: tuple[BlockKind, ...]


def shortened(model: nn.Module) -> Shortened:
    """A copy of the model without the repetitions of its blocks.

    A list of blocks is cut behind the first block of the last kind, so every block keeps its place: models look up
    what belongs to a block by its number.
    """
    lists = dict(_lists_of_blocks(model, ""))
    kinds: list[BlockKind] = []
    with contextlib.ExitStack() as stack:
        for path, container in lists.items():
            groups = _groups(container)
            length = 1 + max(places[0] for places in groups)
            names = [f"{path}.{name}" if path else name for name, _ in container.named_children()]
            for places in groups:
                kinds.append(BlockKind(tuple(names[i] for i in places), sum(i < length for i in places)))
            stack.enter_context(_cut(container, length))
        return Shortened(copy.deepcopy(model), tuple(kinds))


def whole(model: nn.Module) -> Shortened:
    """A copy of the model with all of its blocks."""
    kinds = shortened(model).kinds
    return Shortened(copy.deepcopy(model), tuple(BlockKind(kind.names, len(kind.names)) for kind in kinds))


@contextlib.contextmanager
def _cut(container: nn.Module, length: int) -> Iterator[None]:
    children = container._modules
    container._modules = dict(list(children.items())[:length])
    try:
        yield
    finally:
        container._modules = children


def _lists_of_blocks(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost lists in which a block repeats."""
    if isinstance(module, CONTAINERS) and any(len(places) > 1 for places in _groups(module)):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _lists_of_blocks(child, f"{path}.{name}" if path else name)


def _groups(container: nn.Module) -> list[list[int]]:
    """The places in a list of blocks that multiply, grouped by kind; a block without linear layers is no block."""
    groups: dict[Any, list[int]] = {}
    for place, block in enumerate(container.children()):
        if multiplies(block):
            groups.setdefault(_structure(block), []).append(place)
    return list(groups.values())


def multiplies(module: nn.Module) -> bool:
    """Whether a module has a linear layer or experts."""
    return any(True for _ in linears(module)) or any(class_of_experts(each) is not None for each in module.modules())


def _structure(block: nn.Module) -> Any:
    """What two blocks of one kind have in common: classes, the layout of parameters, and settings."""
    return tuple((name, type(module), _parameters(module), _settings(module)) for name, module in block.named_modules())


def _parameters(module: nn.Module) -> tuple[Any, ...]:
    return tuple(
        (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module._parameters.items() if p is not None
    )


def _settings(module: nn.Module) -> tuple[Any, ...]:
    # Floats are left out: rates of dropped paths differ from block to block and take no time.
    return tuple(
        (name, value)
        for name, value in sorted(module.__dict__.items())
        if isinstance(value, bool | int | str) and not _PLACE.fullmatch(name)
    )


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call of a module."""


def calls_of(model: nn.Module, names: list[str], run: Callable[[], object]) -> dict[str, Call]:
    """The arguments with which the modules of these names are called first while ``run`` runs the model.

    Tensors are detached, and need a gradient if they needed one. Modules that are never called are missing.
    """
    found: dict[str, Call] = {}

    def note(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs: found.setdefault(name, detached((args, kwargs))) and None

    with contextlib.ExitStack() as stack:
        for name in names:
            handle = model.get_submodule(name).register_forward_pre_hook(note(name), with_kwargs=True)
            stack.callback(handle.remove)
        run()
    return found


def detached(call: Call) -> Call:
    """A call whose tensors are leaves."""
    cut = lambda x: x.detach().clone().requires_grad_(x.requires_grad)  # noqa: E731
    copied: Call = pytree.tree_map_only(Tensor, cut, call)
    return copied


def tensors_of(call: Call) -> list[torch.Tensor]:
    """The tensors of a call."""
    return [each for each in pytree.tree_leaves(call) if isinstance(each, Tensor)]


@dataclass(frozen=True)
class LayerGroup:
    """Layers of one name but for numbers, and of one size.

    Attributes:
        label: their name, with a star for numbers that repeat.
        pattern: the label, as a pattern for :func:`tritonfp8.convert`.
        name: of the first one.
        count: how many the model has.
        features: in and out features of a linear layer; of experts, features outside and inside.
        experts: how many experts one has, or 0.
        tokens: rows of the input; 0 until it was called.
    """

    label: str
    pattern: str
    name: str
    count: int
    features: tuple[int, int]
    experts: int
    tokens: int = 0

    def called_with(self, call: Call) -> LayerGroup:
        """The group with the tokens of a call."""
        x = tensors_of(call)[0]
        return replace(self, tokens=x.numel() // x.shape[-1])

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens, experts if there are any, and features."""
        return (self.tokens, self.experts, *self.features) if self.experts else (self.tokens, *self.features)

    @property
    def mnk(self) -> tuple[int, int, int] | None:
        """M, N and K of a linear layer; None for experts."""
        return None if self.experts else (self.tokens, self.features[1], self.features[0])


def layer_groups(model: nn.Module) -> list[LayerGroup]:
    """The linear layers and experts of a model, grouped."""
    groups: dict[Any, list[str]] = {}
    experts = [(name, module) for name, module in model.named_modules() if class_of_experts(module) is not None]
    for name, module in (*linears(model), *experts):
        groups.setdefault((pattern_of(name), sizes_of(module), _experts_in(module)), []).append(name)
    return [_group(names, *key[1:]) for key, names in groups.items()]


def _group(names: Sequence[str], features: tuple[int, int], experts: int) -> LayerGroup:
    label = repeated((name, None) for name in names)[0].label
    places = zip(*(name.split(".") for name in names), strict=True)
    pattern = ".".join(place[0] if len(set(place)) == 1 else "*" for place in places)
    return LayerGroup(label, pattern, names[0], len(names), features, experts)


def _experts_in(module: Any) -> int:
    computes = class_of_experts(module)
    return 0 if computes is None else len(next(iter(computes.weights(module).values())))
