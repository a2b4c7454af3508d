"""A figure of an :class:`~tritonfp8.advice.Advice`: the time of each kind of block, by mode and recipe, as bars."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tritonfp8.advice.result import MODES, Advice, BlockTime

COLORS = ("#7f7f7f", "#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#e377c2")


def plot(advice: Advice, path: str | Path) -> None:
    """Draw the blocks: a panel for each kind, a group of bars for each mode, a bar for each contender.

    The dark part of a bar is the GPU's own time; what lies above it waits for the host.

    Raises:
        ValueError: nothing was measured.
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(row.block for row in advice.blocks))
    if not kinds:
        raise ValueError("there is no block to draw: the model repeats none, or too little was measured")
    modes = list(dict.fromkeys(row.mode for row in advice.blocks))
    names = list(dict.fromkeys(row.contender for row in advice.blocks))
    figure = Figure(figsize=(2 + 1.2 * len(modes) * len(kinds) + 0.35 * len(names), 4), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        rows = {(row.mode, row.contender): row for row in advice.blocks if row.block == kind}
        for i, name in enumerate(names):
            for place, mode in enumerate(modes):
                if (mode, name) in rows:
                    at = place + (i - (len(names) - 1) / 2) * 0.8 / len(names)
                    _bar(axes, at, 0.75 / len(names), rows[mode, name], i)
        axes.set_xticks(range(len(modes)), [MODES[mode] for mode in modes])
        axes.set_title(kind, fontsize=9)
        axes.set_ylabel("ms a block, forward and backward")
        axes.set_ylim(bottom=0)
    handles = [_patch(name, i) for i, name in enumerate(names)]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(names)), fontsize=8)
    how = "measured on" if advice.measured else "predicted for"
    where = f"{how} {advice.machine['name']}, {advice.tokens} tokens"
    figure.suptitle(f"{where}; pale: the GPU waits for the host", fontsize=9)
    figure.savefig(path, dpi=120)


def _bar(axes: Any, at: float, width: float, row: BlockTime, color: int) -> None:
    seconds, gpu = row.timing.seconds, row.timing.gpu_seconds
    shade = COLORS[color % len(COLORS)]
    axes.bar(at, 1e3 * seconds, width, color=shade, alpha=1.0 if gpu is None else 0.35)
    if gpu is not None:
        axes.bar(at, 1e3 * min(gpu, seconds), width, color=shade)
    axes.annotate(f"{1e3 * seconds:.2f}", (at, 1e3 * seconds), ha="center", va="bottom", fontsize=7)


def _patch(name: str, color: int) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=COLORS[color % len(COLORS)], label=name)
