"""The figures of an operand in a step, and their heat map."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tritonfp8.specs.checks import require
from tritonfp8.workflow.health.statistics import FIELDS
from tritonfp8.workflow.health.thresholds import OPERANDS

MAX_LABELS = 60
"""Names of layers beside a heat map; of more layers, evenly spaced ones are named."""


class Sample(NamedTuple):
    """The figures of one operand in one step.

    Attributes:
        step: the training step, counted from 0.
        layer: fully qualified name.
        operand: ``"input"``, ``"weight"`` or ``"grad_output"``.
        figures: by field; see :func:`tritonfp8.workflow.health.statistics.measure_all`.
    """

    step: int
    layer: str
    operand: str
    figures: Mapping[str, float]


def plot(path: str | Path, rows: Sequence[Sample], value: str, operand: str | None) -> None:
    """Draw the heat map of :meth:`Monitor.plot`."""
    require("value", value, FIELDS)
    require("operand", operand, (None, *OPERANDS))
    if not rows:
        raise ValueError("no step was sampled yet: there is nothing to plot")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a heat map needs matplotlib: pip install matplotlib") from error
    layers, steps = list(dict.fromkeys(row.layer for row in rows)), sorted({row.step for row in rows})
    operands = OPERANDS if operand is None else (operand,)
    figure = Figure(
        figsize=(3 + 3 * len(operands), max(2.5, 0.22 * min(len(layers), MAX_LABELS) + 1.2)), layout="constrained"
    )
    grids = {each: [[math.nan] * len(steps) for _ in layers] for each in operands}
    for row in rows:
        if row.operand in grids:
            grids[row.operand][layers.index(row.layer)][steps.index(row.step)] = row.figures[value]
    # One scale of colors for all maps.
    finite = [x for grid in grids.values() for line in grid for x in line if math.isfinite(x)] or [0.0]
    low, high = min(finite), max(finite)
    for axes, each in zip(figure.subplots(1, len(operands), squeeze=False)[0], operands, strict=True):
        shown = _between(grids[each], low, high)
        image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap="viridis", vmin=low, vmax=high)
        axes.set_title(each)
        axes.set_xlabel("step")
        _label(axes, layers, steps, named=each == operands[0])
    figure.colorbar(image, ax=figure.axes, label=f"{value} (dB)" if value == "sqnr" else value)
    figure.savefig(path, dpi=120)


def _between(grid: list[list[float]], low: float, high: float) -> list[list[float]]:
    """Infinite figures as the largest or smallest finite one, because they have no color; NaN stays, which is blank."""
    return [[x if math.isnan(x) else min(max(x, low), high) for x in line] for line in grid]


def _label(axes: Any, layers: Sequence[str], steps: Sequence[int], named: bool) -> None:
    every = -(-len(layers) // MAX_LABELS)
    rows = range(0, len(layers), every) if named else ()
    axes.set_yticks(rows, [layers[row] or "model" for row in rows], fontsize=7)
    every = -(-len(steps) // 6)
    axes.set_xticks(range(0, len(steps), every), steps[::every])
