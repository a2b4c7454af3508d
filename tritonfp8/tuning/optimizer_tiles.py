"""Which tile the optimizer step of a stored weight works in.

Columns of a tile are at least 128: so many share a scale of 8-bit moments. A thread has 8 elements, of which it keeps
three numbers each.
"""

from __future__ import annotations

import triton

from tritonfp8.specs import BLOCK_128X128, ROWWISE, TENSORWISE
from tritonfp8.tuning.cast_tiles import BlockShape, CastTile

ELEMENTS = 2048
ELEMENTS_A_WARP = 256
MIN_COLUMNS = 128
# A longer row does not fit in the registers of a program.
MAX_COLUMNS = 4096


def _tile(n: int) -> CastTile:
    elements = max(ELEMENTS, n)
    return CastTile(elements // n, n, elements // ELEMENTS_A_WARP)


def of_blocks(block: BlockShape, k: int) -> CastTile | None:
    """The tile that has whole blocks of a weight of ``k`` columns, if the first one begins with the weight; or None."""
    if block == ROWWISE:
        n = max(MIN_COLUMNS, triton.next_power_of_2(k))
        return _tile(n) if n <= MAX_COLUMNS else None
    return _tile(MIN_COLUMNS) if block not in (TENSORWISE, BLOCK_128X128) else None


def of_parts(block: BlockShape) -> CastTile:
    """The tile that has parts of a block, or of several."""
    return _tile(MIN_COLUMNS if block[1] != -1 else 512)
