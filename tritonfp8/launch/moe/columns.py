"""The cast of matrices to scales of whole columns, whose second pass reads from the cache."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tritonfp8.kernels.moe import columns as kernels
from tritonfp8.launch.moe.sides import Groups, Side
from tritonfp8.launch.plan import Planner, kernel_constants
from tritonfp8.specs import COLUMNWISE
from tritonfp8.tuning import VECTOR_BYTES, cast_tiles

TILE = cast_tiles.COLUMNS


class Chunks(NamedTuple):
    """What is cast at a time.

    Attributes:
        strips: of TILE.n columns, in each chunk.
        number: of all matrices.
        lag: by how many chunks the casts follow the amaxes.
        tiles: of a chunk.
    """

    strips: int
    number: int
    lag: int
    tiles: int

    @property
    def programs(self) -> int:
        """Two a tile; the first ``lag`` rounds cast nothing, the last ones find nothing."""
        return (self.number + self.lag) * 2 * self.tiles


def chunks_of(matrices: int, rows: int, n: int, itemsize: int, num_sms: int) -> Chunks | None:
    """How matrices ``[rows, n]`` are cast; None if the cache would not keep a chunk until it is cast."""
    height, width = -(-rows // TILE.m), -(-n // TILE.n)
    at_once = cast_tiles.COLUMNS_PER_SM * num_sms
    strips = cast_tiles.COLUMNS_STRIPS
    while strips:
        tiles = height * strips
        # The amaxes for which a cast waits were begun before as many programs as run at once.
        lag = 1 + -(-at_once // (2 * tiles))
        kept = (lag + 1) * tiles * TILE.m * TILE.n * itemsize
        if width % strips == 0 and kept <= cast_tiles.COLUMNS_CACHE:
            return Chunks(strips, matrices * (width // strips), lag, tiles)
        strips //= 2
    return None


def plan_columns(plan: Planner, of: Groups, side: Side, transposes: bool) -> bool:
    """Fill a side of matrices if its scales are of whole columns and the cache serves; else False.

    ``transposes``: the codes are stored transposed.
    """
    if side.block != COLUMNWISE:
        return False
    n = of.width
    chunks = chunks_of(of.groups, of.rows, n, of.x.itemsize, plan.device.num_sms)
    if chunks is None:
        return False
    columns = of.groups * n
    zeros = plan.empty((columns + 1 + chunks.number,), torch.int32, zeroed=True)
    amax, progress = zeros.strided((columns,), (1,)), zeros.strided((1 + chunks.number,), (1,), columns)
    qdata, scale, _ = side.pointers()
    plan.launch(
        kernels.quantize_columns_kernel,
        chunks.programs,
        (of.x, qdata, scale, amax, progress),
        (chunks.number, chunks.lag, of.rows, n, *side.scale_sizes, *side.q_strides, *side.scale_strides),
        {
            **kernel_constants(side.spec, side.block),
            "TRANSPOSED": transposes,
            "DIRECT_CAST": plan.device.has_direct_cast,
            "EVEN": of.rows % TILE.m == 0 and n % TILE.n == 0,
            "TILE_M": TILE.m,
            "TILE_N": TILE.n,
            "STRIPS": chunks.strips,
            "R": TILE.rows_a_thread(VECTOR_BYTES) if transposes else 1,
        },
        **TILE.options(),
    )
    return True
