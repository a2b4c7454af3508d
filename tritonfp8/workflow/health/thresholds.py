"""Figures that deserve a warning, as data: a field, a limit, and what to try."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from tritonfp8.specs.checks import require

OPERANDS = ("input", "weight", "grad_output")

_COMPARISONS: Mapping[str, Callable[[float, float], bool]] = MappingProxyType(
    {"above": operator.gt, "below": operator.lt, "at most": operator.le}
)


@dataclass(frozen=True)
class Threshold:
    """A limit of a figure.

    Attributes:
        name: of the problem, such as ``"overflow"``.
        field: one of ``tritonfp8.workflow.health.FIELDS``.
        when: ``"above"``, ``"below"`` or ``"at most"``: the figures for which it warns.
        limit: in the unit of the field.
        says: what the figure means; ``{value:.3g}`` and other fields such as ``{outlier_channel:.0f}`` are filled in.
        advice: what to try.
    """

    name: str
    field: str
    when: str
    limit: float
    says: str
    advice: str

    def __post_init__(self) -> None:
        require("when", self.when, tuple(_COMPARISONS))

    def is_met(self, figures: Mapping[str, float]) -> bool:
        """Whether the figures of an operand deserve this warning."""
        return _COMPARISONS[self.when](figures[self.field], self.limit)


@dataclass(frozen=True)
class Finding:
    """A threshold that an operand met.

    Attributes:
        step: the training step.
        layer: fully qualified name.
        operand: ``"input"``, ``"weight"`` or ``"grad_output"``.
        problem: the name of the threshold.
        value: the figure.
        text: what it means, and what to try.
    """

    step: int
    layer: str
    operand: str
    problem: str
    value: float
    text: str

    def __str__(self) -> str:
        return f"step {self.step}, layer {self.layer!r}, {self.operand}: {self.text}"


THRESHOLDS = (
    Threshold(
        "not finite",
        "nonfinite_share",
        "above",
        0.0,
        "{value:.2%} of the elements are NaN or infinite",
        "look at the layer before it, or for a gradient after it, and lower the learning rate. float16 overflows at "
        "65504: use bfloat16 or a loss scaler",
    ),
    Threshold(
        "overflow",
        "saturated_share",
        "above",
        0.0,
        "{value:.2%} of the elements are beyond the format and are clipped",
        "use a recipe whose scales are rounded up (scale_rounding='pow2'), such as 'mxfp8' or 'rowwise'",
    ),
    Threshold(
        "dead",
        "amax",
        "at most",
        0.0,
        "all elements are zero, so the layer learns nothing",
        "look at its initialization, at activations before it that are always zero, and at frozen or detached layers "
        "after it",
    ),
    Threshold(
        "outlier channel",
        "outlier_ratio",
        "above",
        100.0,
        "channel {outlier_channel:.0f} is {value:.3g} times the median channel",
        "use a recipe of finer blocks for this layer, such as 'blockwise' or 'mxfp8', or 'bf16'; "
        "tritonfp8.sensitivity compares them",
    ),
    Threshold(
        "underflow",
        "flushed_share",
        "above",
        0.05,
        "{value:.2%} of the elements are too small for their scale and become zero",
        "use a recipe of finer blocks for this layer, such as 'rowwise' instead of 'tensorwise', or 'mxfp8'",
    ),
    Threshold(
        "noise",
        "sqnr",
        "below",
        20.0,
        "its SQNR is {value:.3g} dB",
        "use a recipe of finer blocks for this layer, or 'bf16'; tritonfp8.sensitivity compares them",
    ),
)
"""The thresholds of :func:`tritonfp8.monitor`. On normal data e4m3 has an SQNR of about 31 dB, and e5m2 of 25 dB."""


def findings(
    step: int, layer: str, operand: str, figures: Mapping[str, float], thresholds: tuple[Threshold, ...]
) -> list[Finding]:
    """The thresholds that the figures of an operand meet."""
    found = []
    for each in thresholds:
        if each.is_met(figures):
            value = figures[each.field]
            text = f"{each.says.format(value=value, **figures)}. To try: {each.advice}."
            found.append(Finding(step, layer, operand, each.name, value, text))
    return found
