"""A cast by one scale for a whole matrix, that also returns the amax: for the cast of the transpose, later."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonfp8 import reference
from tritonfp8.launch import cast
from tritonfp8.launch.executor import planned
from tritonfp8.launch.plan import Planner, View
from tritonfp8.specs import TENSORWISE, spec_of


def plan_quantize_with_amax(plan: Planner, x: View, spec: str) -> list[View] | None:
    """Outputs: qdata, scale, and the amax, float32 ``[1, 1]``."""
    found = spec_of(spec)
    if not x.numel() or found.block != TENSORWISE:
        return None
    side, qdata, scale = cast.new_side(plan, x.shape, found, False, None)
    amax = plan.empty((1, 1), torch.float32)
    along = x.t() if cast.reads_along_columns(x) else x
    # As for both orientations: the maxima of the programs are reduced to one before the cast.
    bits = cast.whole_dim_amax(plan, along, [TENSORWISE], True, True, amax)[TENSORWISE]
    cast.plan_sides(plan, x, side._replace(amax=bits), None)
    return [qdata, scale, amax]


def quantize_with_amax(x: Tensor, spec: str) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the twin of :func:`tritonfp8.reference.quantize_with_amax`; an amax of NaN may have any payload."""
    results = planned(plan_quantize_with_amax, (x,), (spec,))
    if results is None:
        return reference.quantize_with_amax(x, spec)
    qdata, scale, amax = results
    return qdata, scale, amax
