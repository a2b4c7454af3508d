"""The figures of a step in a few numbers: the layers that lose most, and shares of all operands."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tritonfp8.workflow.health.heat_map import Sample

WORST = 3
"""Layers that ``str(monitor)`` shows whether or not a figure is beyond a threshold."""


def worst_layers(samples: Iterable[Sample], count: int) -> list[Sample]:
    """The ``count`` layers whose lowest SQNR is lowest, each by the sample that has it."""
    lowest: dict[str, Sample] = {}
    for each in samples:
        before = lowest.get(each.layer)
        if each.is_quantized and (before is None or each.figures["sqnr"] < before.figures["sqnr"]):
            lowest[each.layer] = each
    return sorted(lowest.values(), key=lambda each: each.figures["sqnr"])[:count]


def lines_of_worst(samples: Iterable[Sample]) -> list[str]:
    """The layers of the lowest SQNR, for ``str(monitor)``: a headline and a line each; none without quantization."""
    worst = worst_layers(samples, WORST)
    lines = []
    for step, layer, operand, figures in worst:
        # Of zeros, and of values that the format has, nothing is lost.
        sqnr = "exact" if figures["sqnr"] == math.inf else f"{figures['sqnr']:.1f} dB"
        lost = f"{figures['flushed_share']:.2%} flushed to zero, {figures['saturated_share']:.2%} saturated"
        lines.append(f"  {sqnr}, {lost}: {layer or 'the model'}, {operand}, step {step}")
    return ["lowest SQNR:", *lines] if lines else []


def summary_of(samples: Sequence[Sample], flops_share: float | None) -> dict[str, float | str]:
    """What :meth:`Monitor.summary` returns, from the samples of one step."""
    quantized = [each for each in samples if each.is_quantized]
    found: dict[str, float | str] = {}
    for worst in worst_layers(quantized, 1):
        # Without an error there is no worst layer, and loggers plot no infinity.
        if worst.figures["sqnr"] != math.inf:
            found["fp8/worst_sqnr_db"] = worst.figures["sqnr"]
            found["fp8/worst_layer"] = worst.layer or "the model"
            found["fp8/worst_operand"] = worst.operand
    for share in ("flushed_share", "saturated_share"):
        found[f"fp8/{share}"] = sum(each.figures[share] for each in quantized) / max(len(quantized), 1)
    return found if flops_share is None else {**found, "fp8/flops_share": flops_share}
