"""Which tile the optimizer step of a stored weight works in.

Columns of a tile are at least 128: so many share a scale of 8-bit moments. A thread has eight neighboring columns or
more: it computes what they share once, such as the state of their random numbers and the addresses of their scales.
"""

from __future__ import annotations

from typing import NamedTuple

import triton

from tritonfp8.specs import BLOCK_128X128, ROWWISE, TENSORWISE
from tritonfp8.tuning.cast_tiles import BlockShape, CastTile

ELEMENTS_A_WARP = 256
MIN_COLUMNS = 128
# Rows take as few warps as have the registers for their weights: few wait less for each other.
WARPS_OF_ROWS = (4, 8, 16)
WARPS_OF_SQUARES = 16
# A thread keeps eight weights of each tile of its program.
MAX_TILES = 7
# So that 16 warps share a multiprocessor.
REGISTERS = 128
# Two groups of eight columns a thread, which share what a program computes once.
PAIRED = CastTile(16, MIN_COLUMNS, 4, registers=REGISTERS)
PAIRED_WIDE = CastTile(4, 4 * MIN_COLUMNS, 4, registers=REGISTERS)


class Blocks(NamedTuple):
    """The part of a weight that one program has: whole scale blocks, as ``down x right`` tiles."""

    tile: CastTile
    down: int
    right: int

    def programs(self, m: int, k: int) -> int:
        """Programs for a weight ``[m, k]``."""
        return -(-m // (self.down * self.tile.m)) * -(-k // (self.right * self.tile.n))

    def holds_whole(self, m: int, k: int) -> bool:
        """Whether no program reaches beyond a weight ``[m, k]``."""
        return m % (self.down * self.tile.m) == 0 and k % (self.right * self.tile.n) == 0


def _tile(n: int, warps: int) -> CastTile:
    return CastTile(ELEMENTS_A_WARP * warps // n, n, warps, registers=REGISTERS)


def of_blocks(block: BlockShape, k: int) -> Blocks | None:
    """The part of a program if it has whole blocks of a weight of ``k`` columns; None if no program can."""
    if block == ROWWISE:
        for warps in WARPS_OF_ROWS:
            n = min(max(MIN_COLUMNS, triton.next_power_of_2(k)), ELEMENTS_A_WARP * warps)
            if k <= MAX_TILES * n:
                return Blocks(_tile(n, warps), 1, -(-k // n))
        return None
    if block == BLOCK_128X128:
        tile = _tile(block[1], WARPS_OF_SQUARES)
        return Blocks(tile, block[0] // tile.m, 1)
    return None if block == TENSORWISE else Blocks(PAIRED, 1, 1)


def of_parts(block: BlockShape) -> CastTile:
    """The tile that has parts of a block, or of several."""
    return PAIRED if block[1] != -1 else PAIRED_WIDE
