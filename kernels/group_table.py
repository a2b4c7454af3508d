"""Which rows a program works on: tables that the other kernels of groups read, made from the ends of the groups.

Nothing reads ``offsets`` on the host, so their values may be anything. They are read as if they had been clamped: an
end before that of the group before it is that end, and an end beyond the tokens is the last token. The rows from the
last end on are one more group, of no matrix.
"""

import triton
import triton.language as tl

from tritonfp8.kernels.pdl import begin

FIELDS: tl.constexpr = tl.constexpr(4)


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit
def _bounds(offsets_ptr, tokens, groups, SIZE: tl.constexpr):
    """First row and end of each group. The group after the last has the rest of the rows, those after it are empty."""
    index = tl.arange(0, SIZE)
    before = (index >= 1) & (index <= groups)
    starts = tl.load(offsets_ptr + index - 1, mask=before, other=0)
    starts = tl.where(index > groups, tokens, tl.minimum(tl.maximum(starts, 0), tokens))
    ends = tl.load(offsets_ptr + index, mask=index < groups, other=0)
    ends = tl.where(index >= groups, tokens, tl.minimum(tl.maximum(ends, 0), tokens))
    return index, tl.associative_scan(starts, 0, _later), tl.associative_scan(ends, 0, _later)


@triton.jit
def bounds_of(offsets_ptr, group, tokens, groups, SIZE: tl.constexpr):
    """First row and end of one group."""
    index, starts, ends = _bounds(offsets_ptr, tokens, groups, SIZE)
    return tl.sum(tl.where(index == group, starts, 0), 0), tl.sum(tl.where(index == group, ends, 0), 0)


@triton.jit
def _of_chosen(values, chosen):
    """The value of the chosen index of each row of ``chosen``."""
    return tl.sum(tl.where(chosen, values[None, :], 0), 1)


@triton.jit
def row_tiles_kernel(
    offsets_ptr, table_ptr, tokens, groups, entries,
    TILE: tl.constexpr, ALIGNED: tl.constexpr, IN_TURN: tl.constexpr, STEP: tl.constexpr, SIZE: tl.constexpr,
    ENTRIES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write the table of tiles of TILE rows, each of one group: group, first row, end of the group, its start.

    After the ``entries`` of the table comes the number of tiles; entries from there on are not set. ALIGNED: the t-th
    tile of the table has the tokens of the t-th TILE columns of a tensor of groups of columns
    (:func:`tritonfp8.specs.group_column`), so some tiles have no rows. Else no tile is empty, and tiles begin at
    multiples of STEP, the first of a group perhaps before its start. IN_TURN: aligned tiles stand in another order, the
    first ones of all groups before the second ones. SIZE is a power of two above the number of groups.
    """
    begin(DEPENDENT)
    index, starts, ends = _bounds(offsets_ptr, tokens, groups, SIZE)
    before = starts % STEP
    tiles = tl.where(ends > starts, (ends - starts + before + TILE - 1) // TILE, 0)
    if ALIGNED:
        last = tokens // TILE + groups
        first = tl.where(index < groups, starts // TILE + index, last)
        count = last + tl.sum(tl.where(index == groups, tiles, 0), 0)
    else:
        first = tl.cumsum(tiles, 0) - tiles
        count = tl.sum(tiles, 0)
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    begun = (first[None, :] <= entry[:, None]) & (index <= groups)[None, :]
    group = tl.sum(begun.to(tl.int32), 1) - 1
    chosen = group[:, None] == index[None, :]
    start = _of_chosen(starts, chosen)
    row = start - start % STEP + (entry - _of_chosen(first, chosen)) * TILE
    if IN_TURN:
        following = tl.where(index + 1 < groups, ends // TILE + index + 1, last)
        lengths = tl.where(index < groups, following - first, 0)[None, :]
        place = (entry - _of_chosen(first, chosen))[:, None]
        # Tiles of all groups at earlier places, and at this place those of groups before.
        earlier = tl.minimum(lengths, place) + ((lengths > place) & (index[None, :] < group[:, None])).to(tl.int32)
        # Tiles of no group stay where they are.
        at = tl.where(entry < last, tl.sum(earlier, 1), entry)
    else:
        at = entry
    to = table_ptr + at * FIELDS
    written = entry < entries
    tl.store(to, group, mask=written)
    tl.store(to + 1, row, mask=written)
    tl.store(to + 2, _of_chosen(ends, chosen), mask=written)
    tl.store(to + 3, start, mask=written)
    if tl.program_id(0) == 0:
        tl.store(table_ptr + entries * FIELDS, count)


@triton.jit
def largest_first_kernel(
    offsets_ptr, table_ptr, tokens, groups,
    SIZE: tl.constexpr, ENTRIES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write the groups by their number of tokens, the largest first: group, 0, end, start.

    The last programs to start then have the least to do. Equal groups keep their order.
    """
    begin(DEPENDENT)
    index, starts, ends = _bounds(offsets_ptr, tokens, groups, SIZE)
    sizes = tl.where(index < groups, ends - starts, -1)
    group = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    chosen = group[:, None] == index[None, :]
    size = _of_chosen(sizes, chosen)
    larger = (sizes[None, :] > size[:, None]) | ((sizes[None, :] == size[:, None]) & (index[None, :] < group[:, None]))
    to = table_ptr + tl.sum(larger.to(tl.int32), 1) * FIELDS
    written = group < groups
    tl.store(to, group, mask=written)
    tl.store(to + 1, group * 0, mask=written)
    tl.store(to + 2, _of_chosen(ends, chosen), mask=written)
    tl.store(to + 3, _of_chosen(starts, chosen), mask=written)
