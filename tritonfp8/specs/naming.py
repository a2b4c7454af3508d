"""Names of layers and parameters in reports and messages: repeated ones are one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

V = TypeVar("V", bound=Hashable)

# What torch.compile, checkpointing and FSDP put into the names of modules. A state_dict has it, a checkpoint not.
INSERTED = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


class Repeated(NamedTuple, Generic[V]):
    """Layers whose names differ only in numbers, and that have the same verdict.

    Attributes:
        label: ``model.layers.*.mlp.up_proj (32x)``, or the name of a single one.
        names: their full names.
        verdict: what a report says of each.
    """

    label: str
    names: tuple[str, ...]
    verdict: V


def unwrapped(name: str) -> str:
    """A name as it is without ``torch.compile``, checkpointing and FSDP around a module."""
    return ".".join(part for part in name.split(".") if part not in INSERTED)


def repeated(rows: Iterable[tuple[str, V]]) -> list[Repeated[V]]:
    """Group the rows of a report, names with verdicts, in the order of their first names.

    For a part of the layers of one pattern, and for up to three layers, numbers take the place of the star:
    ``model.layers.0-1,31.mlp (3x)``.
    """
    groups: dict[tuple[str, V], list[str]] = {}
    of_pattern: dict[str, set[str]] = {}
    for name, verdict in rows:
        groups.setdefault((pattern_of(name), verdict), []).append(name)
        of_pattern.setdefault(pattern_of(name), set()).add(name)
    return [
        Repeated(_label(names, len(names) == len(of_pattern[pattern])), tuple(names), verdict)
        for (pattern, verdict), names in groups.items()
    ]


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns. A row may have fewer cells than the first; its last cell may be longer than its column."""
    longest = len(rows[0]) if rows else 0
    widths = [max(len(row[i]) for row in rows if i < len(row) - 1 or len(row) == longest) for i in range(longest)]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]


def listed(names: Iterable[str], limit: int = 8) -> str:
    """Names for a message.

    Up to ``limit`` stand as they are. Of more, repeated ones are one, and the message says how many are left out.
    """
    return _listed(repeated((name, None) for name in names), limit)


def reasons(rows: Iterable[tuple[str, str]], limit: int = 8, others: str = "") -> list[str]:
    """Lines ``names: reason`` for a message, a line for each reason.

    The last says how many of them are left out, and ``others``: where they are found.
    """
    of: dict[str, list[Repeated[str]]] = {}
    for each in repeated(rows):
        of.setdefault(each.verdict, []).append(each)
    lines = [f"{_listed(groups, limit)}: {reason}" for reason, groups in list(of.items())[:limit]]
    return lines + ([f"and {len(of) - limit} more{others}"] if len(of) > limit else [])


def _listed(groups: Sequence[Repeated[V]], limit: int) -> str:
    names = [name or "the model" for each in groups for name in each.names]
    shown = names if len(names) <= limit else [each.label for each in groups]
    more = f" and {len(shown) - limit} more" if len(shown) > limit else ""
    return ", ".join(shown[:limit]) + more


def pattern_of(name: str) -> str:
    """The pattern of a name that repeats over blocks: a star for each number."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _label(names: list[str], is_whole: bool) -> str:
    if len(names) == 1:
        return names[0]
    places = list(zip(*(name.split(".") for name in names), strict=True))
    varying = [place for place in places if len(set(place)) > 1]
    numbers = sorted({int(number) for number in varying[0]})
    star = _ranges(numbers) if len(varying) == 1 and (len(numbers) <= 3 or not is_whole) else "*"
    return ".".join(star if place in varying else place[0] for place in places) + f" ({len(names)}x)"


def _ranges(numbers: list[int]) -> str:
    """``0-1,31``; a star for more than three ranges."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    found = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return ",".join(found) if len(found) <= 3 else "*"
