"""The figures of an operand in a step, and their heat map."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tritonfp8.specs.checks import require
from tritonfp8.workflow.health.statistics import FIELDS
from tritonfp8.workflow.health.thresholds import OPERANDS, Threshold

MAX_LABELS = 60
"""Names of layers beside a heat map; of more layers, evenly spaced ones are named."""

SCALES = {"sqnr": (20.0, 35.0)}
"""The colors of a figure always mean the same, so that maps of two runs compare: from the threshold of noise to beyond
the SQNR of e4m3 on normal data. The colors of other figures span the figures of the map."""
OF_QUANTIZED = ("sqnr", "flushed_share", "saturated_share", "scale_min", "scale_max")
"""Figures that say nothing of an operand in high precision."""
GREY, BEYOND = "0.82", "crimson"


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

    @property
    def is_quantized(self) -> bool:
        """Whether the layer quantizes this operand. A NaN also takes its scale away, but is counted."""
        figures = self.figures
        return not (math.isnan(figures["scale_min"]) and figures["sqnr"] == math.inf and not figures["nonfinite_share"])


def plot(
    path: str | Path, rows: Sequence[Sample], value: str, operand: str | None, thresholds: Sequence[Threshold]
) -> None:
    """Draw the heat map of :meth:`Monitor.plot`."""
    require("value", value, FIELDS)
    require("operand", operand, (None, *OPERANDS))
    if not rows:
        raise ValueError("no step was sampled yet: there is nothing to plot")
    try:
        from matplotlib import colormaps
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
        if row.operand in grids and (row.is_quantized or value not in OF_QUANTIZED):
            grids[row.operand][layers.index(row.layer)][steps.index(row.step)] = row.figures[value]
    low, high = SCALES.get(value) or _range_of(grids.values())
    # A figure below a fixed scale is beyond the threshold: it must not look like one just above.
    colors = colormaps["viridis"].with_extremes(under=BEYOND if value in SCALES else None)
    for axes, each in zip(figure.subplots(1, len(operands), squeeze=False)[0], operands, strict=True):
        axes.set_facecolor(GREY)
        shown = _between(grids[each], -1e30 if value in SCALES else low, high)
        image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap=colors, vmin=low, vmax=high)
        axes.set_title(each)
        axes.set_xlabel("step")
        _label(axes, layers, steps, named=each == operands[0])
    label = f"{value} (dB)" if value == "sqnr" else value
    bar = figure.colorbar(image, ax=figure.axes, label=label, extend="both" if value in SCALES else "neither")
    _mark(bar, [each.limit for each in thresholds if each.field == value and low <= each.limit <= high])
    if any(math.isnan(x) for grid in grids.values() for line in grid for x in line):
        _explain_grey(figure)
    figure.savefig(path, dpi=120)


def _range_of(grids: Iterable[list[list[float]]]) -> tuple[float, float]:
    """The range of the finite figures of all maps: they have one scale of colors."""
    finite = [x for grid in grids for line in grid for x in line if math.isfinite(x)] or [0.0]
    return min(finite), max(finite)


def _between(grid: list[list[float]], low: float, high: float) -> list[list[float]]:
    """Infinite figures as the largest or smallest finite one, because they have no color; NaN stays, which is grey."""
    return [[x if math.isnan(x) else min(max(x, low), high) for x in line] for line in grid]


def _mark(bar: Any, limits: Sequence[float]) -> None:
    """Mark the thresholds on the scale of colors."""
    for limit in limits:
        bar.ax.axhline(limit, color=BEYOND, linewidth=3)
        bar.ax.annotate(
            "threshold", (0, limit), (-3, 0), textcoords="offset points", xycoords=("axes fraction", "data"),
            ha="right", va="center", rotation=90, fontsize=7, color=BEYOND,
        )  # fmt: skip


def _explain_grey(figure: Any) -> None:
    from matplotlib.patches import Patch

    figure.legend(handles=[Patch(color=GREY, label="nothing quantized")], loc="outside lower right", fontsize=7)


def _label(axes: Any, layers: Sequence[str], steps: Sequence[int], named: bool) -> None:
    every = -(-len(layers) // MAX_LABELS)
    rows = range(0, len(layers), every) if named else ()
    axes.set_yticks(rows, [layers[row] or "model" for row in rows], fontsize=7)
    every = -(-len(steps) // 6)
    axes.set_xticks(range(0, len(steps), every), steps[::every])
