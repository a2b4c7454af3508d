"""The cast of matrices to scales of whole columns, which reads each element once."""

from __future__ import annotations

import torch

from tritonfp8.kernels.moe import columns as kernels
from tritonfp8.launch.moe.sides import Groups, Side
from tritonfp8.launch.plan import Planner, kernel_constants
from tritonfp8.specs import COLUMNWISE
from tritonfp8.tuning import VECTOR_BYTES, cast_tiles

TILE = cast_tiles.COLUMNS


def run_together(tiles: int, num_sms: int) -> bool:
    """Whether the tiles of a strip of columns run at the same time on a GPU that does nothing else."""
    return tiles <= cast_tiles.COLUMNS_PER_SM * num_sms


def plan_columns(plan: Planner, of: Groups, side: Side, transposes: bool) -> bool:
    """Fill a side of matrices if its scales are of whole columns, and few enough rows; else False.

    ``transposes``: the codes are stored transposed.
    """
    n = of.width
    tiles, strips = -(-of.rows // TILE.m), -(-n // TILE.n)
    if side.block != COLUMNWISE or not run_together(tiles, plan.device.num_sms):
        return False
    columns, all_strips = of.groups * n, of.groups * strips
    zeros = plan.empty((columns + 2 + all_strips,), torch.int32, zeroed=True)
    amax, progress = zeros.strided((columns,), (1,)), zeros.strided((2 + all_strips,), (1,), columns)
    left = plan.empty((all_strips * tiles,), torch.int32)
    # The interpreter runs one program after another.
    looks = 0 if plan.device.capability is None else cast_tiles.COLUMNS_LOOKS
    qdata, scale, _ = side.pointers()
    for kernel, programs in (
        (kernels.quantize_columns_kernel, all_strips * tiles),
        (kernels.quantize_left_kernel, min(all_strips * tiles, plan.device.num_sms)),
    ):
        plan.launch(
            kernel,
            programs,
            (of.x, qdata, scale, amax, progress, left),
            (tiles, strips, of.rows, n, *side.scale_sizes, *side.q_strides, *side.scale_strides),
            {
                **kernel_constants(side.spec, side.block),
                "TRANSPOSED": transposes,
                "DIRECT_CAST": plan.device.has_direct_cast,
                "EVEN": of.rows % TILE.m == 0 and n % TILE.n == 0,
                "LOOKS": looks,
                "TILE_M": TILE.m,
                "TILE_N": TILE.n,
                "R": TILE.rows_a_thread(VECTOR_BYTES) if transposes else 1,
            },
            **TILE.options(),
        )
    return True
