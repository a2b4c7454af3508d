"""Casts of the shards of many weights in one launch: first their amaxes, then their codes by amaxes reduced over ranks.

A step casts hundreds of shards, and one launch each costs the host more time than the GPU needs for the cast. So one
launch serves all, and a program finds its shard in a table on the device. A row of the table has ``FIELDS`` integers:

    0  address of the shard ``[n, k]``, contiguous        4  tiles of all shards before this one
    1  n                                                  5  offset of its first code in the output, in bytes
    2  k                                                  6  row stride of the output, in bytes
    3  unused
    8 + 4 i ...  orientation i: index of its first amax in the buffer; amaxes in a row of its block grid; row and column
                 of the shard's first element in the matrix of these blocks

Blocks with several rows and several columns must be aligned with tiles.
"""

import triton
import triton.language as tl

from tritonfp8.kernels.cast.quantize import spread_rows, transpose_tile
from tritonfp8.kernels.numerics import encode_fp32, magnitude_bits, reduce_max, round_to_format, saturate
from tritonfp8.kernels.pdl import begin

FIELDS: tl.constexpr = tl.constexpr(16)


@triton.jit
def _find(table_ptr, owners_ptr, like_ptr, ALIGNED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Table row, pointer and size of this program's shard, and first row and column of its tile."""
    row = table_ptr + tl.load(owners_ptr + tl.program_id(0)).to(tl.int64) * FIELDS
    x_ptr = tl.load(row).to(like_ptr.dtype)
    M = tl.load(row + 1)
    N = tl.load(row + 2)
    if ALIGNED:
        x_ptr, M, N = tl.multiple_of(x_ptr, 16), tl.multiple_of(M, 16), tl.multiple_of(N, 16)
    tile = tl.program_id(0) - tl.load(row + 4)
    tiles_n = tl.cdiv(N, TILE_N)
    return row, x_ptr, M, N, tile // tiles_n * TILE_M, tile % tiles_n * TILE_N


@triton.jit
def _max_into(amax_ptr, form, values, rows, cols, M, N, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Raise the amaxes of one weight orientation to the block maxima of a tile of magnitudes."""
    first = amax_ptr + tl.load(form)
    row, col = tl.load(form + 2), tl.load(form + 3)
    if ROWS == 1:
        tl.atomic_max(first + row + rows, reduce_max(values, 1), mask=rows < M, sem="relaxed")
    elif COLS == 1:
        tl.atomic_max(first + col + cols, reduce_max(values, 0), mask=cols < N, sem="relaxed")
    else:
        highest = reduce_max(reduce_max(values, 1), 0)
        if ROWS != -1:
            block = (row + tl.min(rows)) // ROWS * tl.load(form + 1) + (col + tl.min(cols)) // COLS
            first += block
        tl.atomic_max(first, highest, sem="relaxed")


@triton.jit
def amax_of_shards_kernel(
    table_ptr, owners_ptr, like_ptr, amax_ptr,
    ROWS_0: tl.constexpr, COLS_0: tl.constexpr, ROWS_1: tl.constexpr, COLS_1: tl.constexpr, FORMS: tl.constexpr,
    ALIGNED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Compute the amaxes of each shard in one or two orientations into ``amax_ptr`` (int32 bits, zeroed before)."""
    begin(DEPENDENT)
    row, x_ptr, M, N, first_row, first_col = _find(table_ptr, owners_ptr, like_ptr, ALIGNED, TILE_M, TILE_N)
    rows = first_row + tl.arange(0, TILE_M)
    cols = first_col + tl.arange(0, TILE_N)
    x = tl.load(x_ptr + rows[:, None] * N + cols[None, :], mask=(rows < M)[:, None] & (cols < N)[None, :], other=0.0)
    values = magnitude_bits(x.to(tl.float32))
    _max_into(amax_ptr, row + 8, values, rows, cols, M, N, ROWS_0, COLS_0)
    if FORMS == 2:
        _max_into(amax_ptr, row + 12, values, rows, cols, M, N, ROWS_1, COLS_1)


@triton.jit
def quantize_shards_kernel(
    table_ptr, owners_ptr, like_ptr, rounded_ptr, amax_ptr, q_ptr,
    ROWS: tl.constexpr, COLS: tl.constexpr, QMAX: tl.constexpr, MANTISSA_BITS: tl.constexpr,
    EMIN: tl.constexpr, POW2: tl.constexpr, TRANSPOSED: tl.constexpr, DIRECT_CAST: tl.constexpr,
    ALIGNED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, R: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Round each shard to the dtype of ``rounded_ptr``, quantize it by the amaxes of its first orientation, and store
    it untransposed or TRANSPOSED.
    """
    begin(DEPENDENT)
    row, x_ptr, M, N, first_row, first_col = _find(table_ptr, owners_ptr, like_ptr, ALIGNED, TILE_M, TILE_N)
    to, stride = tl.load(row + 5), tl.load(row + 6)
    if ALIGNED:
        to, stride = tl.multiple_of(to, 16), tl.multiple_of(stride, 16)
    rows = first_row + spread_rows(0, TILE_M, R)
    cols = first_col + tl.arange(0, TILE_N)
    x = tl.load(x_ptr + rows[:, None] * N + cols[None, :], mask=(rows < M)[:, None] & (cols < N)[None, :], other=0.0)
    x = x.to(rounded_ptr.dtype.element_ty).to(tl.float32)
    form = row + 8
    row_0, col_0 = tl.load(form + 2), tl.load(form + 3)
    if ROWS == 1:
        groups = (row_0 + rows)[:, None]
        mask = (rows < M)[:, None]
    elif COLS == 1:
        groups = (col_0 + cols)[None, :]
        mask = (cols < N)[None, :]
    else:
        groups = tl.zeros((1, 1), tl.int64)
        mask = groups == 0
        if ROWS != -1:
            groups += (row_0 + first_row) // ROWS * tl.load(form + 1) + (col_0 + first_col) // COLS
    bits = tl.load(amax_ptr + tl.load(form) + groups, mask=mask, other=0)
    enc, _ = encode_fp32(bits, QMAX, POW2)
    scaled = x * enc
    if not DIRECT_CAST:
        # A direct conversion saturates.
        scaled = round_to_format(saturate(scaled, QMAX), MANTISSA_BITS, EMIN)
    q = scaled.to(q_ptr.dtype.element_ty)
    if TRANSPOSED:
        rows = first_row + tl.arange(0, TILE_M)
        mask = (cols < N)[:, None] & (rows < M)[None, :]
        tl.store(q_ptr + to + cols[:, None] * stride + rows[None, :], transpose_tile(q, R), mask=mask)
    else:
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        tl.store(q_ptr + to + rows[:, None] * stride + cols[None, :], q, mask=mask)
