"""Casts of several weights in one launch each: see :mod:`tritonfp8.kernels.cast.weights`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tritonfp8 import reference
from tritonfp8.launch.casts import codes as of_codes
from tritonfp8.launch.casts import dense
from tritonfp8.launch.casts.transposes import plan_transposes
from tritonfp8.launch.executor import planned
from tritonfp8.launch.launcher import lists_served_by
from tritonfp8.launch.plan import Planner, View
from tritonfp8.specs import spec_of


def plan_quantize_weights(plan: Planner, *arguments: object) -> list[View] | None:
    """Outputs: see :func:`plan_transposes`.

    Args:
        plan: the planner.
        arguments: a view of each matrix; with codes a view of each scale; then the text of the spec, and of the spec
            of the codes or None.
    """
    *given, text, codes = arguments
    views = [x for x in given if isinstance(x, View)]
    if codes is None:
        return plan_transposes(plan, views, spec_of(str(text)))
    count = len(views) // 2
    return plan_transposes(plan, views[:count], spec_of(str(text)), views[count:], spec_of(str(codes)))


@lists_served_by(plan_quantize_weights, reference.quantize_weights)
def quantize_weights(
    x: Tensor, others: Sequence[Tensor], spec: str, scales: Sequence[Tensor], codes: str | None = None
) -> list[Tensor]:
    """Launch the twin of :func:`tritonfp8.reference.quantize_weights`."""
    results = planned(plan_quantize_weights, (x, *others, *scales), (spec, codes))
    if results is not None:
        return list(results)
    if codes is None:
        return [tensor for each in (x, *others) for tensor in dense.quantize(each, spec, True)]
    pairs = zip((x, *others), scales, strict=True)
    return [tensor for each, scale in pairs for tensor in of_codes.transpose_codes(each, scale, codes, spec)]
