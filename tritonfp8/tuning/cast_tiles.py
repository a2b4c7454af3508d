"""Which tile each cast works in: data, and the rules that pick a row of it.

A block shape is ``(rows, cols)`` of the elements that share a scale, -1 for a whole dim.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import triton

from tritonfp8.specs import BLOCK_1X32, BLOCK_1X128, BLOCK_128X128, COLUMNWISE, ROWWISE, TENSORWISE

VECTOR_BYTES = 16
WARP_SIZE = 32
MIN_COLUMNS = 128

BlockShape = tuple[int, int]


class CastTile(NamedTuple):
    """How a cast is split among programs.

    Attributes:
        m: rows of a tile.
        n: columns of a tile.
        warps: warps a program.
        group: rows of tiles that are worked on together, column by column.
        registers: the most a thread may take, so that more programs share a multiprocessor; 0 is the compiler's choice.
    """

    m: int
    n: int
    warps: int
    group: int = 1
    registers: int = 0

    def options(self) -> dict[str, int]:
        """How a kernel on this tile is compiled."""
        return {"num_warps": self.warps, **({"maxnreg": self.registers} if self.registers else {})}

    def sizes(self) -> dict[str, int]:
        """The compile-time arguments of a tile, in the order of the kernels."""
        return {"TILE_M": self.m, "TILE_N": self.n}

    def stores(self, transposes: bool) -> dict[str, int]:
        """:meth:`sizes`, and how many rows of it a thread holds to store codes, perhaps of the transpose."""
        return {**self.sizes(), "R": self.rows_a_thread(VECTOR_BYTES) if transposes else 1}

    def programs(self, m: int, n: int) -> int:
        """Tiles of ``x [m, n]``."""
        return -(-m // self.m) * -(-n // self.n)

    def holds_whole(self, m: int, n: int) -> bool:
        """Whether no tile of ``x [m, n]`` reaches beyond it."""
        return m % self.m == 0 and n % self.n == 0

    def fits(self, block: BlockShape, m: int, n: int) -> bool:
        """Whether each block of ``x [m, n]`` lies in one tile."""
        return (block[0] != -1 or m <= self.m) and (block[1] != -1 or n <= self.n)

    def narrowed(self, n: int) -> CastTile:
        """As many elements in fewer columns, where half of its columns hold rows of ``n``."""
        m, width = self.m, self.n
        while width > MIN_COLUMNS and n <= width // 2:
            m, width = 2 * m, width // 2
        return self._replace(m=m, n=width)

    def rows_a_thread(self, columns_a_thread: int) -> int:
        """Rows that a thread holds of the tile, at most the rows of one store."""
        threads = WARP_SIZE * self.warps
        columns_a_thread = min(columns_a_thread, max(1, self.m * self.n // threads))
        rows_at_once = max(1, threads * columns_a_thread // self.n)
        return min(max(1, self.m // rows_at_once), VECTOR_BYTES)


class AmaxPass(NamedTuple):
    """How one pass over ``x`` finds the partial maxima of rows and columns.

    Attributes:
        tile: what a program takes at a time.
        programs: the most of them a multiprocessor.
    """

    tile: CastTile
    programs: int


UNALIGNED_WARPS = 16

# By the block in the coordinates of the result.
NORMAL = {
    TENSORWISE: CastTile(32, 128, 4),
    ROWWISE: CastTile(32, 128, 4),  # a row that does not fit in a tile
    BLOCK_1X128: CastTile(8, 1024, 8),
    BLOCK_128X128: CastTile(128, 128, 8),
    BLOCK_1X32: CastTile(8, 1024, 8),
}
TRANSPOSED = {
    TENSORWISE: CastTile(128, 128, 4, group=8),
    ROWWISE: CastTile(128, 64, 4, group=8),
    BLOCK_1X128: CastTile(128, 128, 4, group=8),
    BLOCK_128X128: CastTile(128, 128, 4),
    BLOCK_1X32: CastTile(128, 128, 4, group=8),
}
BOTH = {
    TENSORWISE: CastTile(64, 128, 4, group=8),
    ROWWISE: CastTile(128, 128, 4),
    BLOCK_1X128: CastTile(128, 128, 4),
    BLOCK_128X128: CastTile(128, 128, 8, group=8),
    BLOCK_1X32: CastTile(128, 128, 4),
}
# Of whole rows, by the longest row that a tile holds.
ROW_TILES = {
    128: CastTile(32, 128, 4),
    256: CastTile(16, 256, 4),
    512: CastTile(8, 512, 4),
    1024: CastTile(4, 1024, 4),
    2048: CastTile(2, 2048, 4),
    4096: CastTile(1, 4096, 4),
    8192: CastTile(1, 8192, 8),
    16384: CastTile(1, 16384, 8),
}
MAX_ROW_IN_TILE = max(ROW_TILES)
# Of whole rows, where the amaxes of columns are found in the same pass: a program keeps the column amaxes of its rows.
ROWS_WITH_COLUMNS = {**ROW_TILES, 16384: CastTile(1, 16384, 16, registers=128)}
# Longer rows, where the amaxes of columns are of codes: of values this tile spills.
LONG_ROWS_WITH_CODES = CastTile(1, 32768, 16, registers=128)
# Warps of these programs on a multiprocessor, and the stages of their loads. Few programs have few partial maxima.
ROWS_WARPS = 16
ROWS_STAGES = 3
# The same of groups of rows: programs, by how many run at once, so that a second round is not nearly empty; and the
# reduce of their partial maxima.
ROUNDS_OF_GROUP_ROWS = 2
GROUP_MAXIMA = CastTile(256, 32, 4)
# Of partial maxima of rows, or of rows and columns; only of columns; of the whole tensor.
AMAX_OF_LINES = AmaxPass(CastTile(16, 512, 4), 8)
AMAX_OF_SHORT_ROWS = AmaxPass(CastTile(32, 512, 8), 2)
AMAX_OF_COLUMNS = AmaxPass(CastTile(64, 128, 4), 8)
AMAX_OF_WHOLE = AmaxPass(CastTile(8, 1024, 4), 8)
LONGEST_SHORT_ROW = 2048
PARTIAL_AMAX_STAGES = 1
# The sums of columns over tiles: tiles by columns.
COLUMN_SUMS = CastTile(32, 64, 4)
TRANSPOSE = CastTile(128, 128, 4, group=8)
DEQUANTIZE = CastTile(64, 128, 4)
# Of formats of two codes a byte: a thread holds a block.
PACKED = CastTile(1, 4096, 4)
# Of what such a cast does to rows, which takes more registers.
MEASURED = CastTile(1, 2048, 4)
# Of codes to 8-bit codes, eight at a time.
EXPANDED = CastTile(2, 4096, 4)
# Blocks of MX codes to bf16: a thread reads 16 codes at a time.
WIDEN = CastTile(128, 32, 4)
# Of the casts of many shards in one launch.
SHARDS = CastTile(128, 128, 8)
# Of groups of rows, and the sums of their parts; to large blocks; of rows times their factors to scales of a dim.
GROUPS = CastTile(128, 128, 4)
GROUPS_OF_LARGE_BLOCKS = CastTile(128, 128, 8)
# Tiles of scaled rows run down the columns: all groups at once read the same columns, which the cache has.
SCALED_GROUPS = CastTile(128, 128, 8, group=4096)
# Of transposes that are made from codes, by the block of the codes: from stored codes, from the values whose codes are
# made again, and in the pass that makes the codes. A limit of registers lets three programs share a multiprocessor: on
# an H200 1x128 took 88 us and not 100, 1x32 from codes 63 us and not 77, though it spills 184 bytes.
OF_CODES = {BLOCK_1X128: GROUPS_OF_LARGE_BLOCKS, BLOCK_1X32: CastTile(128, 128, 4, registers=168)}
OF_VALUES_OF_CODES = {BLOCK_1X128: GROUPS_OF_LARGE_BLOCKS}
WITH_CODES = {BLOCK_1X128: CastTile(128, 128, 4, registers=168), BLOCK_1X32: CastTile(128, 64, 4)}
# Of the amaxes of codes.
AMAX_OF_CODES = CastTile(64, 256, 4)
# Of matrices to scales of columns, read once; how often a program looks whether the amaxes of its columns are known
# before it leaves its tile.
COLUMNS = CastTile(256, 64, 4)
COLUMNS_LOOKS = 2000
# How many of these tiles a multiprocessor has room for, at least.
COLUMNS_PER_SM = 2
# Elements of a single matrix that is cast so: one launch more takes as long as a second read of a smaller one.
COLUMNS_LEAST = 2**25
# Of the amaxes of rows and columns of groups, whose rows may be picked.
AMAX_OF_GROUPS = CastTile(16, 512, 4)
# Of the amaxes of groups whose rows are SwiGLU of others, computed in the same pass, or its gradient.
AMAX_OF_SWIGLU = CastTile(64, 128, 4)
AMAX_OF_ITS_GRADIENT = CastTile(16, 256, 4)
# Of rows that are picked from codes; scales of a row at a time.
PICK = CastTile(8, 512, 1)
PICK_SCALES = 32
# Of rows of no group.
REST = CastTile(128, 128, 8)
GROUP_SUMS = CastTile(16, 128, 4)
# SwiGLU and its gradient; the sum of the rows of a token.
SWIGLU = CastTile(4, 1024, 4)
SUM_OF_ROWS = CastTile(2, 1024, 4)
# Elements of the rows of a token that a program multiplies at a time.
DOTS = 4096
DOTS_WARPS = 4

# Most partial maxima of a line that a cast reduces itself, and most that it reduces in one step.
MOST_PARTS_IN_A_CAST = 32
CAST_STEP_PARTS = 1024
# The reduce of partial maxima: elements of a tile, the parts in one step, warps.
REDUCE_TILE_ELEMENTS = 2048
REDUCE_STEP_PARTS = 256
REDUCE_WARPS = 4

# Of two block shapes, the one whose tile serves both: the one that needs most of a tile.
DEMAND = (TENSORWISE, ROWWISE, BLOCK_128X128, BLOCK_1X32, BLOCK_1X128)


def reduce_tile(parts: int, lines: int) -> CastTile:
    """The tile that reduces ``parts`` partial maxima of each of ``lines`` rows and columns: parts by lines."""
    side_by_side = triton.next_power_of_2(lines)
    at_once = min(triton.next_power_of_2(parts), max(REDUCE_STEP_PARTS, REDUCE_TILE_ELEMENTS // side_by_side))
    return CastTile(at_once, min(REDUCE_TILE_ELEMENTS // at_once, side_by_side), REDUCE_WARPS)


def step_parts(parts: int) -> int:
    """How many of ``parts`` partial maxima a cast reduces in one step."""
    return 1 if parts == 1 else min(triton.next_power_of_2(parts), CAST_STEP_PARTS)


def has_own_reduce(parts: int, block: BlockShape, normal: bool, transposes: bool) -> bool:
    """Whether a launch of its own reduces the partial maxima of ``block``, or the cast into one or two results does.

    A cast that does not transpose hides the extra reads, so it reduces them itself. A transposing cast stalls on them,
    so a separate launch is faster (H200). A few parts of columns are read in less time than a launch takes.
    """
    if normal and transposes:
        return True
    return transposes if block == TENSORWISE else parts > MOST_PARTS_IN_A_CAST


def row_tile(n: int) -> CastTile:
    """A tile of whole rows of ``n`` elements, at most :data:`MAX_ROW_IN_TILE`."""
    return next(tile for longest, tile in ROW_TILES.items() if n <= longest)


def rows_with_columns(n: int, itemsize: int, codes: bool = False) -> CastTile | None:
    """The tile of whole rows of ``n`` elements whose columns are found, too; None for rows that fit in none.

    ``codes``: the amaxes of the columns are of codes.
    """
    tile = next((tile for longest, tile in ROWS_WITH_COLUMNS.items() if n <= longest), None)
    if tile is None and codes and itemsize == 2 and n <= LONG_ROWS_WITH_CODES.n:
        return LONG_ROWS_WITH_CODES
    if tile is None or itemsize == 2:
        return tile
    if tile.m > 1:
        return tile._replace(m=tile.m // 2)
    # 32 warps have 64 registers a thread, in which the longest rows of float32 do not fit.
    return tile._replace(warps=2 * tile.warps) if itemsize == 4 and tile.warps <= 8 else None


def rows_of_a_part(m: int) -> int:
    """The rows that have a partial maximum of each column, so that a cast reduces few of them; a multiple of a tile."""
    step = AMAX_OF_COLUMNS.tile.m
    return max(4, -(-m // (MOST_PARTS_IN_A_CAST * step))) * step


def transposing(vectors: bool) -> CastTile:
    """The tile of a cast to a transpose with a scale a row, of sizes with ``vectors`` or without."""
    tile = TRANSPOSED[ROWWISE]
    return tile if vectors else tile._replace(warps=UNALIGNED_WARPS, registers=0)


def dots_of_rows(each: int) -> CastTile:
    """The tile of the dot products of a token's gradient with its ``each`` rows."""
    rows = triton.next_power_of_2(each)
    return CastTile(rows, max(1, DOTS // rows), DOTS_WARPS)


def of_groups(blocks: Collection[BlockShape], scaled: bool) -> CastTile:
    """The tile of a cast of groups to scales of these blocks; ``scaled``: of rows times their factors."""
    if TENSORWISE in blocks or BLOCK_128X128 in blocks:
        return GROUPS_OF_LARGE_BLOCKS
    return SCALED_GROUPS if scaled and set(blocks) <= {ROWWISE, COLUMNWISE} else GROUPS


def of_codes(block: BlockShape, source: str) -> CastTile:
    """The tile of transposes that are made from codes with this block.

    ``source``: ``"codes"``, or ``"cast"`` for the values that codes are made of again, or ``"both"`` in the pass that
    makes the codes.
    """
    return {"codes": OF_CODES, "cast": OF_VALUES_OF_CODES, "both": WITH_CODES}[source].get(block, GROUPS)


def amax_of_groups(n: int, blocks: Collection[BlockShape]) -> CastTile:
    """The tile of the pass that finds the amaxes of ``blocks`` of groups of rows ``[*, n]``."""
    return AMAX_OF_WHOLE.tile if set(blocks) == {TENSORWISE} else AMAX_OF_GROUPS.narrowed(n)


def amax_pass(n: int, blocks: Collection[BlockShape]) -> AmaxPass:
    """The pass that finds the amaxes of ``blocks`` of ``x [m, n]``, in its coordinates, each whole in a dim."""
    if ROWWISE in blocks:
        return AMAX_OF_SHORT_ROWS if n <= LONGEST_SHORT_ROW else AMAX_OF_LINES
    return AMAX_OF_COLUMNS if COLUMNWISE in blocks else AMAX_OF_WHOLE


def holding(block: BlockShape) -> CastTile:
    """A tile of whole blocks, in the coordinates of ``x``; no block is whole in a dim."""
    return NORMAL.get(block) or TRANSPOSED[block[::-1]]


def choose(m: int, n: int, block: BlockShape | None, block_t: BlockShape | None) -> CastTile:
    """The tile of a cast of ``x [m, n]``; the block of each wanted result in its own coordinates."""
    if block_t is None:
        assert block is not None
        return row_tile(n) if block == ROWWISE and n <= MAX_ROW_IN_TILE else NORMAL[block].narrowed(n)
    tile = TRANSPOSED[block_t] if block is None else BOTH[max(block, block_t, key=DEMAND.index)]
    if m % VECTOR_BYTES or n % VECTOR_BYTES:
        # Without vectors each element has an address of its own: fewer of them a thread.
        return tile._replace(warps=UNALIGNED_WARPS, registers=0)
    return tile
