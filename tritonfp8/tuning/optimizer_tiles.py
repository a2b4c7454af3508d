"""Which tile the optimizer step of a stored weight works in.

Columns of a tile are at least 128: so many share a scale of 8-bit moments.
"""

from __future__ import annotations

import triton

from tritonfp8.tuning.cast_tiles import BlockShape, CastTile

ELEMENTS = 4096
ELEMENTS_A_WARP = 512
MIN_COLUMNS = 128
# A longer row has its amax found by a launch before.
MAX_COLUMNS = 16384


def tile(block: BlockShape, k: int) -> CastTile:
    """The tile for a weight of ``k`` columns whose scales have this block."""
    rows, cols = block
    if rows == cols == 128:
        return CastTile(rows, cols, 32)
    n = MIN_COLUMNS
    if cols == -1 and rows == 1:
        n = max(n, triton.next_power_of_2(k))
        n = n if n <= MAX_COLUMNS else ELEMENTS
    elif cols == -1:
        n = 512
    m = max(1, ELEMENTS // n)
    return CastTile(m, n, max(4, m * n // ELEMENTS_A_WARP))


def has_blocks(tile: CastTile, block: BlockShape, k: int) -> bool:
    """Whether each block of a weight of ``k`` columns lies in one tile, if the first one begins at its first element."""
    return block[0] != -1 and (block[1] != -1 or k <= tile.n)
