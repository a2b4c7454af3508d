"""The transpose of codes."""

from __future__ import annotations

import torch

from tritonfp8 import reference
from tritonfp8.kernels.cast import quantize as kernels
from tritonfp8.launch.launcher import launcher
from tritonfp8.launch.plan import Planner, View
from tritonfp8.tuning import VECTOR_BYTES, cast_tiles


def plan_transpose(plan: Planner, qdata: View) -> list[View]:
    """One output, ``[n, m]``."""
    m, n = qdata.shape
    out = plan.empty((n, m), qdata.dtype)
    if not qdata.numel():
        return [out]
    tile = cast_tiles.TRANSPOSE
    plan.launch(
        kernels.transpose_kernel,
        tile.programs(m, n),
        (qdata.retyped(torch.uint8), out.retyped(torch.uint8)),
        (m, n, *qdata.strides),
        {
            "EVEN": tile.holds_whole(m, n), "TILE_M": tile.m, "TILE_N": tile.n,
            "R": tile.rows_a_thread(VECTOR_BYTES), "GROUP": tile.group,
        },
        **tile.options(),
    )  # fmt: skip
    return [out]


transpose = launcher(plan_transpose, reference.transpose)
