"""Operands of one shape, measured together. On a small model, the host time of launches is the cost of a sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonfp8.specs import QuantSpec
from tritonfp8.workflow.health.statistics import (
    RUN,
    measure_all,
    some_rows,
    view_of_rows,
    whole_amax,
    whole_amaxes,
    worst_of,
)

Key = tuple[str, str]
"""A layer and an operand."""

GROUP_BYTES = 64 << 20
"""The rows of a group are measured, and freed, when they take so much memory."""


class OperandKind(NamedTuple):
    """What operands must have in common to be measured together."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    spec: QuantSpec | None


class OperandGroup(NamedTuple):
    """Operands of one kind whose figures are not computed yet."""

    keys: list[Key]
    parts: list[Tensor]
    amaxes: list[Tensor]


def _figures_of(matrices: Sequence[Tensor], rows: int, spec: QuantSpec | None) -> Tensor:
    """The figures of matrices of one shape, ``[matrices, len(FIELDS)]``, of so many rows of each."""
    shape, amaxes = matrices[0].shape, whole_amaxes(matrices)
    views = [view_of_rows(x, rows) for x in matrices]
    at_once = max(1, GROUP_BYTES // views[0].nbytes)
    found = []
    for i in range(0, len(views), at_once):
        parts = torch.stack(views[i : i + at_once]).view(-1, views[0].numel() // shape[1], shape[1])
        found.append(measure_all(parts, amaxes[i : i + at_once], shape.numel(), spec))
    return torch.cat(found)


class StepOperands:
    """The operands of one step.

    Args:
        rows: rows of an operand that are measured.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._waiting: dict[OperandKind, OperandGroup] = {}
        self._figures: dict[Key, Tensor | None] = {}
        self._equal_to: dict[Key, Key] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._figures

    @torch.no_grad()
    def add(self, key: Key, x: Tensor, spec: QuantSpec | None) -> None:
        """Add an operand ``[M, K]``. What is measured of it is copied: the caller may overwrite it afterwards."""
        self._figures[key] = None
        kind = OperandKind(x.shape, x.dtype, x.device, spec)
        group = self._waiting.setdefault(kind, OperandGroup([], [], []))
        group.keys.append(key)
        group.parts.append(some_rows(x, self._rows))
        group.amaxes.append(whole_amax(x))
        # One more operand of this kind would take more.
        if (len(group.parts) + 1) * group.parts[0].nbytes > GROUP_BYTES:
            self._measure(kind)

    @torch.no_grad()
    def measure_now(self, operands: Iterable[tuple[Key, Tensor, QuantSpec | None]]) -> None:
        """Add operands that nobody overwrites meanwhile: two launches less for each."""
        by_kind: dict[OperandKind, list[tuple[Key, Tensor]]] = {}
        for key, x, spec in operands:
            self._figures[key] = None
            by_kind.setdefault(OperandKind(x.shape, x.dtype, x.device, spec), []).append((key, x))
        for kind, found in by_kind.items():
            figures = _figures_of([x for _, x in found], self._rows, kind.spec)
            self._figures.update(zip([key for key, _ in found], figures.unbind(), strict=True))

    @torch.no_grad()
    def measure_matrices(self, key: Key, x: Tensor, spec: QuantSpec | None) -> None:
        """Add the weights of experts ``[E, N, K]``, each quantized separately: a figure is the worst expert's."""
        rows = max(RUN, self._rows // x.shape[0])
        self._figures[key] = worst_of(_figures_of(x.unbind(), rows, spec))

    def add_equal(self, key: Key, other: Key) -> None:
        """Add an operand that is the tensor of ``other``, quantized alike: it is measured once."""
        self._figures[key] = None
        self._equal_to[key] = other

    def figures(self) -> dict[Key, Tensor]:
        """The figures of each operand, in the order in which they were added."""
        for kind in list(self._waiting):
            self._measure(kind)
        found = {key: self._figures[self._equal_to.get(key, key)] for key in self._figures}
        return {key: figures for key, figures in found.items() if figures is not None}

    def _measure(self, kind: OperandKind) -> None:
        group = self._waiting.pop(kind)
        found = measure_all(torch.stack(group.parts), torch.stack(group.amaxes), kind.shape.numel(), kind.spec)
        self._figures.update(zip(group.keys, found.unbind(), strict=True))
