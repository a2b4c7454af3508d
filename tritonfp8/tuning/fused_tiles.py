"""Which tile each fused kernel works in: data, and the rules that pick a row of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import triton

from tritonfp8.specs import BLOCK_128X128
from tritonfp8.tuning.cast_tiles import BlockShape

MAX_ROW = 16384
"""Longest row that a rows kernel holds. Beyond it RMSNorm runs as plain torch and a cast."""

WIDEST_TILE_ITEMSIZE = 2
LONG_BLOCK = 128


class Rows(NamedTuple):
    """How a rows kernel runs: rows a step, warps, programs a multiprocessor, whether the next step is prefetched.

    ``hold``: whether a program keeps the weight in registers, in place of reading it from the cache for each row.
    ``writing_parts``: programs a multiprocessor, at most, where each of them also writes a maximum of each column.
    """

    rows: int
    warps: int
    per_sm: int
    prefetch: bool
    hold: bool = False
    writing_parts: int = 4

    def programs(self, m: int, num_sms: int) -> int:
        """As many as run at once: each walks over some of ``m`` rows."""
        return min(-(-m // self.rows), num_sms * self.per_sm)


class Tiles(NamedTuple):
    """How a tile kernel runs: with ``per_sm`` programs a multiprocessor that walk over tiles (0: one for each tile).

    ``stages`` above 1 reads ahead by so many tiles less one.
    """

    m: int
    n: int
    warps: int
    per_sm: int = 0
    stages: int = 1

    def programs(self, m: int, n: int, num_sms: int) -> int:
        """Programs for ``x [m, n]``."""
        count = -(-m // self.m) * -(-n // self.n)
        return min(count, num_sms * self.per_sm) if self.per_sm else count


# By the longest row that a configuration serves.
RMS_NORM = {
    1024: Rows(4, 4, 4, False),
    2048: Rows(1, 4, 8, True, hold=True),
    4096: Rows(1, 4, 4, True, hold=True, writing_parts=3),
    8192: Rows(1, 8, 2, True, hold=True),
    MAX_ROW: Rows(1, 8, 2, True, hold=True),
}
RMS_NORM_BACKWARD = {
    1024: Rows(4, 4, 4, False),
    4096: Rows(1, 8, 2, False),
    8192: Rows(1, 16, 1, False),
    MAX_ROW: Rows(1, 16, 1, False),
}
SILU_MUL_ROWS = {
    1024: Rows(4, 4, 1, False),
    4096: Rows(1, 4, 1, False),
    8192: Rows(1, 8, 1, False),
    MAX_ROW: Rows(1, 32, 1, False),
}
# By producer and results: the normal one alone, the transposed one, both with a given amax of the normal one, both with
# blocks that a tile holds.
QUANTIZE_TILES = {
    ("rms_norm", "normal"): Tiles(128, 128, 8),
    ("rms_norm", "transposed"): Tiles(128, 32, 4),
    ("rms_norm", "both"): Tiles(128, 64, 4),
    ("silu_mul", "normal"): Tiles(32, 128, 4),
    ("silu_mul", "transposed"): Tiles(128, 32, 4),
    ("silu_mul", "both"): Tiles(128, 64, 4),
    ("silu_mul", "both in blocks"): Tiles(32, 128, 4),
    ("silu_mul_backward", "normal"): Tiles(64, 128, 8),
    ("silu_mul_backward", "transposed"): Tiles(128, 32, 4),
    ("silu_mul_backward", "both"): Tiles(32, 64, 2),
    ("silu_mul_backward", "both in blocks"): Tiles(32, 64, 2),
}
SQUARE_TILES = Tiles(128, 128, 16)
# Of the pass that finds amax values.
AMAX_TILES = {
    "silu_mul": Tiles(8, 256, 2, 16),
    "silu_mul_backward": Tiles(8, 256, 2, 16),
}
SUM_TILES = Tiles(32, 32, 4)
MIN_ROW_TILE = 128


def rows_config(table: Mapping[int, Rows], n: int) -> tuple[Rows, int]:
    """Configuration for rows of ``n``, at most :data:`MAX_ROW`, and the width of its tile."""
    return next(config for limit, config in table.items() if n <= limit), max(triton.next_power_of_2(n), MIN_ROW_TILE)


def choose(producer: str, block: BlockShape | None, block_t: BlockShape | None) -> Tiles:
    """The tile of a pass that quantizes; the block of each wanted result in the coordinates of the input."""
    if BLOCK_128X128 in (block, block_t):
        return SQUARE_TILES
    if block is None or block_t is None:
        return QUANTIZE_TILES[producer, "transposed" if block is None else "normal"]
    return QUANTIZE_TILES[producer, "both" if -1 in block else "both in blocks"]


def takes_two_launches(itemsize: int, block: BlockShape, block_t: BlockShape) -> bool:
    """Whether no tile serves both results well.

    Blocks of 128 want tiles that are long in the direction of each. Blocks of a tile of 4-byte elements take more
    registers and shared memory than there are.
    """
    wide = itemsize > WIDEST_TILE_ITEMSIZE
    return LONG_BLOCK in (*block, *block_t) or (wide and -1 not in block)
