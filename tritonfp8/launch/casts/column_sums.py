"""Casts to both orientations that also sum each column: a gradient's operands, and the gradient of the bias."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonfp8 import reference
from tritonfp8.kernels.cast.quantize import column_sums_kernel
from tritonfp8.launch import cast
from tritonfp8.launch.launcher import launcher
from tritonfp8.launch.plan import Planner, View
from tritonfp8.tuning import cast_tiles


def plan_quantize_both_sum(plan: Planner, x: View, spec: str, spec_t: str) -> list[View] | None:
    """Outputs: qdata, scale, those of the transpose, and the sums ``[n]``. No plan for a matrix along columns."""
    # float64 is summed as float64, and cast by way of float32.
    if not x.numel() or cast.reads_along_columns(x) or x.dtype == torch.float64:
        return None
    outputs, parts = cast.plan_both_sides(plan, x, spec, spec_t, True)
    assert parts is not None
    n = x.shape[1]
    sums = plan.empty((n,), x.dtype)
    tile = cast_tiles.COLUMN_SUMS
    plan.launch(
        column_sums_kernel,
        -(-n // tile.n),
        (parts, sums),
        parts.shape,
        {"TILE_P": tile.m, "TILE_N": tile.n},
        **tile.options(),
    )
    return [*outputs, sums]


def _sum_alone(x: Tensor, spec: str, spec_t: str) -> tuple[Tensor, ...]:
    return *cast.quantize_both(x, spec, spec_t), x.sum(0)


quantize_both_sum = launcher(plan_quantize_both_sum, reference.quantize_both_sum, _sum_alone)
