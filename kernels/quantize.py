"""Casts between high precision and 8 bits: amax, quantize, dequantize.

One tile kernel quantizes for every block shape and orientation. A transposed result is the same tile stored with its
strides swapped, and its block given in the coordinates of ``x``. A block entry of -1 is the whole dimension.
"""

import triton
import triton.language as tl

from tritonfp8.kernels.numerics import (
    block_amax,
    decode_e8m0,
    encode_e8m0,
    encode_fp32,
    magnitude_bits,
    round_to_format,
    saturate,
    scale_blocks,
)


@triton.jit
def _tile_index(N, TILE_N: tl.constexpr):
    """Row and column of this program's tile. One grid dim: the others end at 65,535."""
    tiles_n = tl.cdiv(N, TILE_N)
    return tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n


@triton.jit
def _group_offsets(pid, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Indices, among all blocks of a dim, of the blocks in tile ``pid``; 0 where the block is the whole dim."""
    if BLOCK == -1:
        return tl.arange(0, 1)
    else:
        return pid * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)


@triton.jit
def _load_tile(x_ptr, rows, cols, M, N, stride_m, stride_n):
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    offsets = rows.to(tl.int64)[:, None] * stride_m + cols.to(tl.int64)[None, :] * stride_n
    return tl.load(x_ptr + offsets, mask=mask, other=0.0), mask


@triton.jit
def _tile_amax(
    bits, amax_ptr, group_m, group_n, groups_m, groups_n, stride_m, stride_n,
    ROWS: tl.constexpr, COLS: tl.constexpr, WHOLE_IN_TILE: tl.constexpr,
):  # fmt: skip
    """Store the amax of the tile's blocks, by an atomic maximum where a block goes on in other tiles."""
    R: tl.constexpr = bits.shape[0] if ROWS == -1 else ROWS
    C: tl.constexpr = bits.shape[1] if COLS == -1 else COLS
    values = block_amax(bits, R, C)
    pointers = amax_ptr + group_m.to(tl.int64)[:, None] * stride_m + group_n.to(tl.int64)[None, :] * stride_n
    mask = (group_m < groups_m)[:, None] & (group_n < groups_n)[None, :]
    if WHOLE_IN_TILE:
        tl.store(pointers, values, mask=mask)
    else:
        tl.atomic_max(pointers, values, mask=mask, sem="relaxed")


@triton.jit
def amax_kernel(
    x_ptr, amax_ptr, amax_t_ptr, M, N, stride_xm, stride_xn,
    groups_m, groups_n, stride_am, stride_an, groups_tm, groups_tn, stride_tm, stride_tn,
    ROWS: tl.constexpr, COLS: tl.constexpr, ROWS_T: tl.constexpr, COLS_T: tl.constexpr,
    NORMAL: tl.constexpr, TRANSPOSED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """amax bits of the blocks of ``x [M, N]``, for one or two block shapes in one pass; int32 outputs start at 0."""
    pid_m, pid_n = _tile_index(N, TILE_N)
    rows = pid_m * TILE_M + tl.arange(0, TILE_M)
    cols = pid_n * TILE_N + tl.arange(0, TILE_N)
    x, _ = _load_tile(x_ptr, rows, cols, M, N, stride_xm, stride_xn)
    bits = magnitude_bits(x.to(tl.float32))
    if NORMAL:
        _tile_amax(
            bits, amax_ptr, _group_offsets(pid_m, TILE_M, ROWS), _group_offsets(pid_n, TILE_N, COLS),
            groups_m, groups_n, stride_am, stride_an, ROWS, COLS, ROWS != -1 and COLS != -1,
        )  # fmt: skip
    if TRANSPOSED:
        _tile_amax(
            bits, amax_t_ptr, _group_offsets(pid_m, TILE_M, ROWS_T), _group_offsets(pid_n, TILE_N, COLS_T),
            groups_tm, groups_tn, stride_tm, stride_tn, ROWS_T, COLS_T, ROWS_T != -1 and COLS_T != -1,
        )  # fmt: skip


@triton.jit
def _quantize_tile(
    x, mask, rows, cols, pid_m, pid_n, q_ptr, s_ptr, amax_ptr, groups_m, groups_n,
    stride_qm, stride_qn, stride_sm, stride_sn, stride_am, stride_an,
    ROWS: tl.constexpr, COLS: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr,
    E8M0: tl.constexpr, POW2: tl.constexpr, GIVEN_AMAX: tl.constexpr, DIRECT_CAST: tl.constexpr,
):  # fmt: skip
    x = x.to(tl.float32)
    R: tl.constexpr = x.shape[0] if ROWS == -1 else ROWS
    C: tl.constexpr = x.shape[1] if COLS == -1 else COLS
    group_m = _group_offsets(pid_m, x.shape[0], ROWS)
    group_n = _group_offsets(pid_n, x.shape[1], COLS)
    group_mask = (group_m < groups_m)[:, None] & (group_n < groups_n)[None, :]
    if GIVEN_AMAX:
        offsets = group_m.to(tl.int64)[:, None] * stride_am + group_n.to(tl.int64)[None, :] * stride_an
        bits = tl.load(amax_ptr + offsets, mask=group_mask, other=0)
    else:
        bits = block_amax(magnitude_bits(x), R, C)
    if E8M0:
        enc, scale = encode_e8m0(bits, EMAX, QMAX_MANTISSA, POW2)
    else:
        enc, scale = encode_fp32(bits, QMAX, POW2)
    scaled = saturate(scale_blocks(x, enc, R, C), QMAX)
    if not DIRECT_CAST:
        scaled = round_to_format(scaled, MANTISSA_BITS, EMIN)
    q = scaled.to(q_ptr.dtype.element_ty)
    tl.store(q_ptr + rows.to(tl.int64)[:, None] * stride_qm + cols.to(tl.int64)[None, :] * stride_qn, q, mask=mask)
    # Tiles that share a block all hold its scale: the first one writes it.
    first = (ROWS != -1 or pid_m == 0) and (COLS != -1 or pid_n == 0)
    offsets = group_m.to(tl.int64)[:, None] * stride_sm + group_n.to(tl.int64)[None, :] * stride_sn
    tl.store(s_ptr + offsets, scale, mask=group_mask & first)


@triton.jit
def quantize_kernel(
    x_ptr, q_ptr, s_ptr, amax_ptr, qt_ptr, st_ptr, amax_t_ptr, M, N, stride_xm, stride_xn,
    groups_m, groups_n, stride_qm, stride_qn, stride_sm, stride_sn, stride_am, stride_an,
    groups_tm, groups_tn, stride_qtm, stride_qtn, stride_stm, stride_stn, stride_atm, stride_atn,
    ROWS: tl.constexpr, COLS: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr,
    E8M0: tl.constexpr, POW2: tl.constexpr, GIVEN_AMAX: tl.constexpr,
    ROWS_T: tl.constexpr, COLS_T: tl.constexpr, QMAX_T: tl.constexpr, EMAX_T: tl.constexpr,
    QMAX_MANTISSA_T: tl.constexpr, MANTISSA_BITS_T: tl.constexpr, EMIN_T: tl.constexpr,
    E8M0_T: tl.constexpr, POW2_T: tl.constexpr, GIVEN_AMAX_T: tl.constexpr,
    NORMAL: tl.constexpr, TRANSPOSED: tl.constexpr, DIRECT_CAST: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Quantize ``x [M, N]``, its transpose, or both, reading ``x`` once.

    Every stride and every block is in the coordinates of ``x``, those of the transposed result too. A block that does
    not fit in a tile takes its amax bits from ``amax_ptr``.
    """
    pid_m, pid_n = _tile_index(N, TILE_N)
    rows = pid_m * TILE_M + tl.arange(0, TILE_M)
    cols = pid_n * TILE_N + tl.arange(0, TILE_N)
    x, mask = _load_tile(x_ptr, rows, cols, M, N, stride_xm, stride_xn)
    if NORMAL:
        _quantize_tile(
            x, mask, rows, cols, pid_m, pid_n, q_ptr, s_ptr, amax_ptr, groups_m, groups_n,
            stride_qm, stride_qn, stride_sm, stride_sn, stride_am, stride_an,
            ROWS, COLS, QMAX, EMAX, QMAX_MANTISSA, MANTISSA_BITS, EMIN, E8M0, POW2, GIVEN_AMAX, DIRECT_CAST,
        )  # fmt: skip
    if TRANSPOSED:
        if NORMAL:
            # From the cache: the tile would take the registers that the scales of the columns need.
            x, mask = _load_tile(x_ptr, rows, cols, M, N, stride_xm, stride_xn)
        _quantize_tile(
            x, mask, rows, cols, pid_m, pid_n, qt_ptr, st_ptr, amax_t_ptr, groups_tm, groups_tn,
            stride_qtm, stride_qtn, stride_stm, stride_stn, stride_atm, stride_atn,
            ROWS_T, COLS_T, QMAX_T, EMAX_T, QMAX_MANTISSA_T, MANTISSA_BITS_T, EMIN_T, E8M0_T, POW2_T, GIVEN_AMAX_T,
            DIRECT_CAST,
        )  # fmt: skip


@triton.jit
def dequantize_kernel(
    q_ptr, s_ptr, out_ptr, M, N, stride_qm, stride_qn, stride_sm, stride_sn,
    ROWS: tl.constexpr, COLS: tl.constexpr, E8M0: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """``out [M, N] = float32(q) * float32(scale)``, the scale of the block each element lies in; ``out`` contiguous."""
    pid_m, pid_n = _tile_index(N, TILE_N)
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
