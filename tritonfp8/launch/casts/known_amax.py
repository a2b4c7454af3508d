"""Casts that also return the amaxes of the transpose: for the cast of the transpose, later."""

from __future__ import annotations

import torch

from tritonfp8 import reference
from tritonfp8.launch import cast
from tritonfp8.launch.casts.rows import can_plan_rows, plan_rows
from tritonfp8.launch.launcher import launcher
from tritonfp8.launch.plan import Planner, View
from tritonfp8.specs import COLUMNWISE, ROWWISE, TENSORWISE, spec_of, transposed


def plan_quantize_with_amax(plan: Planner, x: View, spec: str, spec_t: str) -> list[View] | None:
    """Outputs: qdata, scale, and the amaxes, float32."""
    found = spec_of(spec)
    blocks = (found.block, transposed(spec_of(spec_t).block))
    if not x.numel() or blocks not in ((TENSORWISE, TENSORWISE), (ROWWISE, COLUMNWISE)):
        return None
    side, qdata, scale = cast.new_side(plan, x.shape, found, False, None)
    along = x.t() if cast.reads_along_columns(x) else x
    if found.block == TENSORWISE:
        amax = plan.empty((1, 1), torch.float32)
        # As for both orientations: the maxima of the programs are reduced to one before the cast.
        bits = cast.whole_dim_amax(plan, along, [TENSORWISE], True, True, amax)[TENSORWISE]
        cast.plan_sides(plan, x, side.with_parts(bits), None)
    elif can_plan_rows(x):
        amax = plan_rows(plan, x, 1, found, qdata, scale)
    else:
        m, n = x.shape
        maxima = plan.empty((1, m + n), torch.float32)
        of_lines = cast.whole_dim_amax(plan, along, [ROWWISE, COLUMNWISE], True, True, maxima)
        # Those of the rows of ``along`` come first.
        of_rows, start = (of_lines[ROWWISE], m) if along is x else (of_lines[COLUMNWISE].transposed(1, 2), 0)
        cast.plan_sides(plan, x, side.with_parts(of_rows), None)
        amax = maxima.strided((1, n), (n, 1), start)
    return [qdata, scale, amax.strided((amax.shape[1], 1), (1, 1))]


# An amax of NaN may have any payload.
quantize_with_amax = launcher(plan_quantize_with_amax, reference.quantize_with_amax)
