"""Which tile the optimizer step of a stored weight works in.

Columns of a tile are at least 128: so many share a scale of 8-bit moments. A thread has 8 elements, of which it keeps
three numbers each.
"""

from __future__ import annotations

from typing import NamedTuple

import triton

from tritonfp8.specs import BLOCK_128X128, ROWWISE, TENSORWISE
from tritonfp8.tuning.cast_tiles import BlockShape, CastTile

ELEMENTS_A_WARP = 256
MIN_COLUMNS = 128
WARPS = 8
# For programs whose weights need the registers of twice as many threads.
MANY_WARPS = 16
# A thread keeps eight weights of each tile of its program.
MAX_TILES = 7
# Of a long row, some weights wait in local memory, so that two programs share a multiprocessor: a third faster.
REGISTERS = 128


class Blocks(NamedTuple):
    """The part of a weight that one program has: whole scale blocks, as ``down x right`` tiles."""

    tile: CastTile
    down: int
    right: int

    def programs(self, m: int, k: int) -> int:
        """Programs for a weight ``[m, k]``."""
        return -(-m // (self.down * self.tile.m)) * -(-k // (self.right * self.tile.n))


def _tile(n: int, warps: int = WARPS) -> CastTile:
    return CastTile(ELEMENTS_A_WARP * warps // n, n, warps, registers=REGISTERS)


def of_blocks(block: BlockShape, k: int) -> Blocks | None:
    """The part of a program if it has whole blocks of a weight of ``k`` columns; None if no program can."""
    if block == ROWWISE:
        for warps in (WARPS, MANY_WARPS):
            n = min(max(MIN_COLUMNS, triton.next_power_of_2(k)), ELEMENTS_A_WARP * warps)
            if k <= MAX_TILES * n:
                return Blocks(_tile(n, warps), 1, -(-k // n))
        return None
    if block == BLOCK_128X128:
        tile = _tile(block[1], MANY_WARPS)
        return Blocks(tile, block[0] // tile.m, 1)
    return None if block == TENSORWISE else Blocks(_tile(MIN_COLUMNS), 1, 1)


def of_parts(block: BlockShape) -> CastTile:
    """The tile that has parts of a block, or of several."""
    return _tile(MIN_COLUMNS if block[1] != -1 else 512)
