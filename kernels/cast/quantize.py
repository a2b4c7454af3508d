"""Casts between high precision and 8 bits: amax, quantize, dequantize.

One tile kernel quantizes every block shape and orientation. It stores a transposed result as the same tile with
swapped strides; the block is given in the coordinates of ``x``. A block entry of -1 is the whole dim.

Coalesced loads need consecutive columns in one thread, coalesced transposed stores need consecutive rows there. So a
tile's rows are loaded in *spread* order: index ``i`` of a spread tile of ``R * L`` rows is row ``i % L * R + i // L``.
A thread with every L-th index then has R consecutive rows. R = 1 is the plain order.
"""

from collections import namedtuple

import triton
import triton.language as tl

from tritonfp8.kernels.names import DISABLE_LICM
from tritonfp8.kernels.numerics import (
    MAGNITUDE_MASK,
    amax_bits,
    block_amax,
    decode_e8m0,
    encode,
    magnitude_bits,
    magnitudes,
    reduce_max,
    round_to_format,
    saturate,
)
from tritonfp8.kernels.pdl import begin

# PARTS = GIVEN: the caller gave one amax a block, so there are no partial maxima to reduce.
GIVEN: tl.constexpr = tl.constexpr(-1)

# One orientation of a cast: codes, scales and amaxes, with their strides in the coordinates of ``x``. Scales and amaxes
# have ``groups_m x groups_n`` blocks; ``parts`` partial maxima of each lie ``stride_part`` apart.
CastSide = namedtuple(
    "CastSide",
    "q_ptr s_ptr amax_ptr groups_m groups_n stride_qm stride_qn stride_sm stride_sn stride_am stride_an parts "
    "stride_part",
    defaults=(0, 0, 1, 0),
)
# Constants of a spec: block and format. PARTS is 0 if every block lies inside one tile, or see ``_given_amax``.
Encoding = namedtuple(
    "Encoding", "ROWS COLS QMAX EMAX QMAX_MANTISSA MANTISSA_BITS EMIN E8M0 POW2 DIRECT_CAST PARTS", defaults=(0,)
)


@triton.jit
def tile_index(tile, M, N, TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP: tl.constexpr):
    """Row and column of a tile. Tiles run down the columns of groups of ``GROUP`` rows.

    Tiles that run at the same time then form a square, so stores of both orientations are close together in memory.
    The grid has one dim, because the others are limited to 65,535.
    """
    tiles_n = tl.cdiv(N, TILE_N)
    if GROUP == 1:
        return tile // tiles_n, tile % tiles_n
    else:
        first = tile // (GROUP * tiles_n) * GROUP
        height = tl.minimum(tl.cdiv(M, TILE_M) - first, GROUP)
        within = tile % (GROUP * tiles_n)
        return first + within % height, within // height


@triton.jit
def group_offsets(pid, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Indices, among all blocks of a dim, of the blocks in tile ``pid``; 0 where the block is the whole dim."""
    if BLOCK == -1:
        return tl.arange(0, 1)
    else:
        return pid * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)


@triton.jit
def spread(values, R: tl.constexpr):
    """``[rows, n]``: plain order -> spread order."""
    rows: tl.constexpr = values.shape[0]
    n: tl.constexpr = values.shape[1]
    if R == 1 or rows == 1:
        return values
    else:
        return tl.reshape(tl.permute(tl.reshape(values, (rows // R, R, n)), (1, 0, 2)), (rows, n))


@triton.jit
def _in_order(values, R: tl.constexpr):
    """``[rows, n]``: spread order -> plain order."""
    rows: tl.constexpr = values.shape[0]
    n: tl.constexpr = values.shape[1]
    if R == 1 or rows == 1:
        return values
    else:
        return tl.reshape(tl.permute(tl.reshape(values, (R, rows // R, n)), (1, 0, 2)), (rows, n))


@triton.jit
def transpose_tile(q, R: tl.constexpr):
    """Spread ``[rows, cols]`` -> ``[cols, rows]`` in plain order.

    Moves uint8, because some of these layout conversions corrupt 8-bit floats.
    """
    rows: tl.constexpr = q.shape[0]
    cols: tl.constexpr = q.shape[1]
    bits = tl.reshape(q.to(tl.uint8, bitcast=True), (R, rows // R, cols))
    return tl.reshape(tl.permute(bits, (2, 1, 0)), (cols, rows)).to(q.dtype, bitcast=True)


@triton.jit
def load_masked(pointers, mask, EVEN: tl.constexpr):
    """Load a tile, zeros where ``mask`` is false; EVEN: it is true everywhere."""
    return tl.load(pointers) if EVEN else tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _store(pointers, values, mask, EVEN: tl.constexpr):
    if EVEN:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=mask)


@triton.jit
def spread_amax(values, ROWS: tl.constexpr, COLS: tl.constexpr, R: tl.constexpr):
    """Maximum of each block of a spread tile. The result's rows are in spread order if ``ROWS`` is 1, else plain."""
    M: tl.constexpr = values.shape[0]
    N: tl.constexpr = values.shape[1]
    C: tl.constexpr = N if COLS == -1 else COLS
    L: tl.constexpr = M // R
    # Reduce within each thread first: threads then exchange R times fewer values.
    if ROWS == 1:
        return _columns_max(values, C)
    else:
        G: tl.constexpr = L if ROWS == -1 else ROWS // R
        values = _columns_max(reduce_max(tl.reshape(values, (R, L, N)), 0) if R > 1 else values, C)
        if G == L:
            return reduce_max(values, 0)[None, :]
        else:
            return reduce_max(tl.reshape(values, (L // G, G, N // C)), 1)


@triton.jit
def _columns_max(values, C: tl.constexpr):
    M: tl.constexpr = values.shape[0]
    N: tl.constexpr = values.shape[1]
    if C == 1:
        return values
    elif C == N:
        return reduce_max(values, 1)[:, None]
    else:
        return reduce_max(tl.reshape(values, (M, N // C, C)), 2)


@triton.jit
def spread_scale(x, enc, ROWS: tl.constexpr, COLS: tl.constexpr, R: tl.constexpr):
    """Multiply a spread tile by the encode factors of its blocks, in the order of :func:`spread_amax`."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    C: tl.constexpr = N if COLS == -1 or COLS > N else COLS
    L: tl.constexpr = M // R
    G: tl.constexpr = L if ROWS == -1 else ROWS // R
    if (ROWS == 1 or G == L) and (C == 1 or C == N):
        return x * enc
    elif ROWS == 1:
        return tl.reshape(tl.reshape(x, (M, N // C, C)) * enc[:, :, None], (M, N))
    else:
        blocks = tl.reshape(x, (R, L // G, G, N // C, C)) * tl.reshape(enc, (1, L // G, 1, N // C, 1))
        return tl.reshape(blocks, (M, N))


@triton.jit
def amax_kernel(
    x_ptr, amax_ptr, M, N, stride_xm, stride_xn, groups_m, groups_n, stride_am, stride_an,
    ROWS: tl.constexpr, COLS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """amax bits (int32) of the blocks of ``x [M, N]``. Each block must lie inside one tile."""
    begin(DEPENDENT)
    pid_m, pid_n = tile_index(tl.program_id(0), M, N, TILE_M, TILE_N, 1)
    rows = pid_m * TILE_M + tl.arange(0, TILE_M)
    cols = pid_n * TILE_N + tl.arange(0, TILE_N)
    x, _ = _load_tile(x_ptr, rows, cols, M, N, stride_xm, stride_xn)
    values = block_amax(magnitude_bits(x.to(tl.float32)), ROWS, COLS)
    group_m = group_offsets(pid_m, TILE_M, ROWS)
    group_n = group_offsets(pid_n, TILE_N, COLS)
    _store_blocks(amax_ptr, values, group_m, group_n, groups_m, groups_n, stride_am, stride_an)


@triton.jit
def partial_amax_kernel(
    x_ptr, row_ptr, col_ptr, whole_ptr, M, N, stride_xm, stride_xn, chunks, stride_part,
    ROW: tl.constexpr, COL: tl.constexpr, WHOLE: tl.constexpr, EVEN: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, R: tl.constexpr, STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Partial maxima for blocks that span a whole dim, as magnitudes. Their maximum is the amax.

    A program takes the columns of one tile and every ``chunks``-th tile of rows, so all programs move down ``x``
    together. Each writes its own partial maxima, so no atomics and no zeroed buffers are needed.

        row_ptr    [cdiv(N, TILE_N), M]       per row, over the columns of a tile
        col_ptr    [chunks, N]                per column, over the rows of a program
        whole_ptr  [chunks * cdiv(N, TILE_N)] over all elements of a program
    """
    begin(DEPENDENT)
    tiles_n = tl.cdiv(N, TILE_N)
    chunk = tl.program_id(0) // tiles_n
    strip = tl.program_id(0) % tiles_n
    L: tl.constexpr = TILE_M // R
    cols = strip * TILE_N + tl.arange(0, TILE_N)
    # Zeros of the dtype of the magnitudes.
    highest = tl.zeros((L, TILE_N), magnitudes(tl.zeros((1,), x_ptr.dtype.element_ty)).dtype)
    for tile in tl.range(chunk, tl.cdiv(M, TILE_M), chunks, num_stages=STAGES, disable_licm=DISABLE_LICM):
        rows = tile * TILE_M + tl.arange(0, TILE_M)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        offsets = rows.to(tl.int64)[:, None] * stride_xm + cols.to(tl.int64)[None, :] * stride_xn
        values = magnitudes(load_masked(x_ptr + offsets, mask, EVEN))
        if ROW:
            tl.store(row_ptr + strip.to(tl.int64) * stride_part + rows, reduce_max(values, 1), mask=rows < M)
        if COL or WHOLE:
            highest = tl.maximum(highest, reduce_max(tl.reshape(values, (R, L, TILE_N)), 0) if R > 1 else values)
    if COL:
        tl.store(col_ptr + chunk.to(tl.int64) * stride_part + cols, reduce_max(highest, 0), mask=cols < N)
    if WHOLE:
        tl.store(whole_ptr + tl.program_id(0), reduce_max(reduce_max(highest, 1), 0))


@triton.jit
def maxima_kernel(
    parts_ptr, amax_ptr, G, split, parts_before, parts_after, TILE_P: tl.constexpr, TILE_G: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Reduce partial maxima ``parts [*, G]`` (floating dtype) to ``amax [G]`` (int32 bits of float32).

    Groups before ``split`` have ``parts_before`` partial maxima, the others ``parts_after``.
    """
    begin(DEPENDENT)
    DTYPE: tl.constexpr = parts_ptr.dtype.element_ty
    groups = tl.program_id(0) * TILE_G + tl.arange(0, TILE_G)
    parts = tl.where(groups < G, tl.where(groups < split, parts_before, parts_after), 0)
    highest = tl.zeros((TILE_P, TILE_G), magnitudes(tl.zeros((1,), DTYPE)).dtype)
    for first in range(0, tl.max(parts, 0), TILE_P):
        part = first + tl.arange(0, TILE_P)
        pointers = parts_ptr + part.to(tl.int64)[:, None] * G + groups[None, :]
        values = tl.load(pointers, mask=part[:, None] < parts[None, :], other=0.0)
        highest = tl.maximum(highest, magnitudes(values))
    tl.store(amax_ptr + groups, amax_bits(reduce_max(highest, 0), DTYPE), mask=groups < G)


@triton.jit
def _given_amax(side, group_m, group_n, dtype: tl.constexpr, PARTS: tl.constexpr):
    """amax bits of blocks, reduced from ``parts`` partial maxima, ``PARTS`` at a time.

    Partial maxima are magnitudes of ``dtype`` or int32 bits. With PARTS = GIVEN the caller's amax may have a sign bit,
    as -0.0, -inf or a negative NaN. The bit is cleared: a negative integer would order below all magnitudes, so inf
    and NaN would count as finite.
    """
    offsets = group_m.to(tl.int64)[:, None] * side.stride_am + group_n.to(tl.int64)[None, :] * side.stride_an
    mask = (group_m < side.groups_m)[:, None] & (group_n < side.groups_n)[None, :]
    if PARTS == 1:
        return amax_bits(tl.load(side.amax_ptr + offsets, mask=mask, other=0), dtype)
    elif PARTS == GIVEN:
        return tl.load(side.amax_ptr + offsets, mask=mask, other=0) & MAGNITUDE_MASK
    else:
        highest = tl.zeros((PARTS, group_m.shape[0], group_n.shape[0]), side.amax_ptr.dtype.element_ty)
        for first in range(0, side.parts, PARTS):
            part = first + tl.arange(0, PARTS)
            pointers = side.amax_ptr + part.to(tl.int64)[:, None, None] * side.stride_part + offsets[None, :, :]
            values = tl.load(pointers, mask=(part < side.parts)[:, None, None] & mask[None, :, :], other=0)
            highest = tl.maximum(highest, values)
        return amax_bits(reduce_max(highest, 0), dtype)


@triton.jit
def quantize_tile(
    x, pid_m, pid_n, is_first, M, N, side,
    ENCODING: tl.constexpr, TRANSPOSED: tl.constexpr, EVEN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Quantize a spread tile and store it with its scales.

    ``is_first``: the tile has the first rows of ``x``. It stores the scales of blocks of all rows.

    Returns:
        The codes and scales of the tile, in spread order.
    """
    if ENCODING.PARTS:
        bits = given_amax(x, pid_m, pid_n, side, ENCODING, R)
    else:
        bits = amax_bits(spread_amax(magnitudes(x), ENCODING.ROWS, ENCODING.COLS, R), x.dtype)
    return store_tile(x, bits, pid_m, pid_n, is_first, M, N, side, ENCODING, TRANSPOSED, EVEN, R)


@triton.jit
def given_amax(x, pid_m, pid_n, side, ENCODING: tl.constexpr, R: tl.constexpr):
    """amax bits of the blocks of a spread tile, which the side has, in the order of :func:`spread_amax`."""
    group_m = group_offsets(pid_m, x.shape[0], ENCODING.ROWS)
    group_n = group_offsets(pid_n, x.shape[1], ENCODING.COLS)
    bits = _given_amax(side, group_m, group_n, x.dtype, ENCODING.PARTS)
    return spread(bits, R) if ENCODING.ROWS == 1 else bits


@triton.jit
def store_tile(
    x, bits, pid_m, pid_n, is_first, M, N, side,
    ENCODING: tl.constexpr, TRANSPOSED: tl.constexpr, EVEN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """:func:`quantize_tile` by the amax bits of its blocks."""
    ROWS: tl.constexpr = ENCODING.ROWS
    COLS: tl.constexpr = ENCODING.COLS
    TILE_M: tl.constexpr = x.shape[0]
    TILE_N: tl.constexpr = x.shape[1]
    group_m = group_offsets(pid_m, TILE_M, ROWS)
    group_n = group_offsets(pid_n, TILE_N, COLS)
    enc, scale = encode(bits, ENCODING.QMAX, ENCODING.EMAX, ENCODING.QMAX_MANTISSA, ENCODING.E8M0, ENCODING.POW2)
    scaled = spread_scale(x.to(tl.float32), enc, ROWS, COLS, R)
    if not ENCODING.DIRECT_CAST:
        # A direct conversion saturates.
        scaled = round_to_format(saturate(scaled, ENCODING.QMAX), ENCODING.MANTISSA_BITS, ENCODING.EMIN)
    q = scaled.to(side.q_ptr.dtype.element_ty)
    cols = pid_n * TILE_N + tl.arange(0, TILE_N)
    if TRANSPOSED:
        rows = pid_m * TILE_M + tl.arange(0, TILE_M)
        offsets = cols.to(tl.int64)[:, None] * side.stride_qn + rows.to(tl.int64)[None, :] * side.stride_qm
        _store(side.q_ptr + offsets, transpose_tile(q, R), (cols < N)[:, None] & (rows < M)[None, :], EVEN)
    else:
        rows = spread_rows(pid_m, TILE_M, R)
        offsets = rows.to(tl.int64)[:, None] * side.stride_qm + cols.to(tl.int64)[None, :] * side.stride_qn
        _store(side.q_ptr + offsets, q, (rows < M)[:, None] & (cols < N)[None, :], EVEN)
    # All tiles of a block compute its scale; the first one stores it.
    if (ROWS != -1 or is_first) and (COLS != -1 or pid_n == 0):
        in_order = _in_order(scale, R) if ROWS == 1 else scale
        _store_blocks(
            side.s_ptr, in_order, group_m, group_n, side.groups_m, side.groups_n, side.stride_sm, side.stride_sn
        )
    return q, scale


@triton.jit
def _store_blocks(ptr, values, group_m, group_n, groups_m, groups_n, stride_m, stride_n):
    mask = (group_m < groups_m)[:, None] & (group_n < groups_n)[None, :]
    offsets = group_m.to(tl.int64)[:, None] * stride_m + group_n.to(tl.int64)[None, :] * stride_n
    tl.store(ptr + offsets, values, mask=mask)


@triton.jit
def spread_rows(pid, TILE: tl.constexpr, R: tl.constexpr):
    """Rows of tile ``pid`` in spread order."""
    i = tl.arange(0, TILE)
    return pid * TILE + i % (TILE // R) * R + i // (TILE // R)


@triton.jit
def quantize_kernel(
    x_ptr, q_ptr, s_ptr, amax_ptr, qt_ptr, st_ptr, amax_t_ptr, sums_ptr, M, N, stride_xm, stride_xn,
    groups_m, groups_n, stride_qm, stride_qn, stride_sm, stride_sn, stride_am, stride_an, parts, stride_part,
    groups_tm, groups_tn, stride_qtm, stride_qtn, stride_stm, stride_stn, stride_atm, stride_atn,
    parts_t, stride_part_t,
    ROWS: tl.constexpr, COLS: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr,
    E8M0: tl.constexpr, POW2: tl.constexpr, PARTS: tl.constexpr,
    ROWS_T: tl.constexpr, COLS_T: tl.constexpr, QMAX_T: tl.constexpr, EMAX_T: tl.constexpr,
    QMAX_MANTISSA_T: tl.constexpr, MANTISSA_BITS_T: tl.constexpr, EMIN_T: tl.constexpr,
    E8M0_T: tl.constexpr, POW2_T: tl.constexpr, PARTS_T: tl.constexpr,
    NORMAL: tl.constexpr, TRANSPOSED: tl.constexpr, SUM: tl.constexpr, DIRECT_CAST: tl.constexpr, EVEN: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Quantize ``x [M, N]``, its transpose, or both, in one pass over ``x``.

    All strides and blocks are in the coordinates of ``x``, also those of the transposed result. A block that does not
    fit in a tile takes its amax from ``amax_ptr``. Tiles run in reverse order: after an amax pass over ``x``, its last
    rows are still in L2. SUM also writes ``sums_ptr [cdiv(M, TILE_M), N]``, float32: the sum over the rows of a tile.
    """
    begin(DEPENDENT)
    pid_m, pid_n = tile_index(tl.num_programs(0) - 1 - tl.program_id(0), M, N, TILE_M, TILE_N, GROUP)
    rows = spread_rows(pid_m, TILE_M, R)
    cols = pid_n * TILE_N + tl.arange(0, TILE_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    pointers = x_ptr + rows.to(tl.int64)[:, None] * stride_xm + cols.to(tl.int64)[None, :] * stride_xn
    x = load_masked(pointers, mask, EVEN)
    if SUM:
        tl.store(sums_ptr + pid_m.to(tl.int64) * N + cols, tl.sum(x.to(tl.float32), 0), mask=cols < N)
    if NORMAL:
        quantize_tile(
            x, pid_m, pid_n, pid_m == 0, M, N,
            CastSide(q_ptr, s_ptr, amax_ptr, groups_m, groups_n, stride_qm, stride_qn, stride_sm, stride_sn,
                     stride_am, stride_an, parts, stride_part),
            Encoding(ROWS, COLS, QMAX, EMAX, QMAX_MANTISSA, MANTISSA_BITS, EMIN, E8M0, POW2, DIRECT_CAST, PARTS),
            False, EVEN, R,
        )  # fmt: skip
    if TRANSPOSED:
        if NORMAL:
            # Load again from the cache: keeping the tile costs registers. The second load also stops the compiler from
            # merging two equal casts; Triton 3.6 moved the bytes of a merged cast to wrong places on Hopper.
            x = load_masked(pointers, mask, EVEN)
        quantize_tile(
            x, pid_m, pid_n, pid_m == 0, M, N,
            CastSide(qt_ptr, st_ptr, amax_t_ptr, groups_tm, groups_tn, stride_qtm, stride_qtn, stride_stm, stride_stn,
                     stride_atm, stride_atn, parts_t, stride_part_t),
            Encoding(ROWS_T, COLS_T, QMAX_T, EMAX_T, QMAX_MANTISSA_T, MANTISSA_BITS_T, EMIN_T, E8M0_T, POW2_T,
                     DIRECT_CAST, PARTS_T),
            True, EVEN, R,
        )  # fmt: skip


@triton.jit
def column_sums_kernel(
    parts_ptr, out_ptr, parts, N, TILE_P: tl.constexpr, TILE_N: tl.constexpr, DEPENDENT: tl.constexpr
):
    """``out [N]``: the sum over ``parts [parts, N]``, float32, always in the same order."""
    begin(DEPENDENT)
    cols = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    total = tl.zeros((TILE_P, TILE_N), tl.float32)
    for first in range(0, parts, TILE_P):
        part = first + tl.arange(0, TILE_P)
        pointers = parts_ptr + part.to(tl.int64)[:, None] * N + cols[None, :]
        total += tl.load(pointers, mask=(part < parts)[:, None] & (cols < N)[None, :], other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def _load_tile(x_ptr, rows, cols, M, N, stride_m, stride_n):
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    offsets = rows.to(tl.int64)[:, None] * stride_m + cols.to(tl.int64)[None, :] * stride_n
    return tl.load(x_ptr + offsets, mask=mask, other=0.0), mask


@triton.jit
def dequantize_kernel(
    q_ptr, s_ptr, out_ptr, M, N, stride_qm, stride_qn, stride_sm, stride_sn,
    ROWS: tl.constexpr, COLS: tl.constexpr, E8M0: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``out [M, N] = float32(q) * float32(scale)`` with the scale of each element's block; ``out`` is contiguous."""
    begin(DEPENDENT)
    pid_m, pid_n = tile_index(tl.program_id(0), M, N, TILE_M, TILE_N, 1)
    rows = pid_m * TILE_M + tl.arange(0, TILE_M)
    cols = pid_n * TILE_N + tl.arange(0, TILE_N)
    q, mask = _load_tile(q_ptr, rows, cols, M, N, stride_qm, stride_qn)
    group_m = rows * 0 if ROWS == -1 else rows // ROWS
    group_n = cols * 0 if COLS == -1 else cols // COLS
    offsets = group_m.to(tl.int64)[:, None] * stride_sm + group_n.to(tl.int64)[None, :] * stride_sn
    scale = tl.load(s_ptr + offsets, mask=mask, other=0)
    if E8M0:
        scale = decode_e8m0(scale)
    out = (q.to(tl.float32) * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :], out, mask=mask)


@triton.jit
def transpose_kernel(
    q_ptr, out_ptr, M, N, stride_qm, stride_qn,
    EVEN: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Transpose ``q [M, N]`` (uint8) into the contiguous ``out [N, M]``."""
    begin(DEPENDENT)
    pid_m, pid_n = tile_index(tl.program_id(0), M, N, TILE_M, TILE_N, GROUP)
    rows = spread_rows(pid_m, TILE_M, R)
    cols = pid_n * TILE_N + tl.arange(0, TILE_N)
    pointers = q_ptr + rows.to(tl.int64)[:, None] * stride_qm + cols.to(tl.int64)[None, :] * stride_qn
    q = load_masked(pointers, (rows < M)[:, None] & (cols < N)[None, :], EVEN)
    rows = pid_m * TILE_M + tl.arange(0, TILE_M)
    offsets = cols.to(tl.int64)[:, None] * M + rows.to(tl.int64)[None, :]
    _store(out_ptr + offsets, transpose_tile(q, R), (cols < N)[:, None] & (rows < M)[None, :], EVEN)
