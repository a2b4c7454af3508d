"""Codes of 4 bits, two a byte: casts to them and from them, and to 8-bit codes with a scale a row.

Tiles are ``[rows, blocks, elements of a block]``: a thread holds elements of one block, and both codes of a byte.
"""

import triton
import triton.language as tl

from tritonfp8.kernels.cast.quantize import tile_index
from tritonfp8.kernels.numerics import (
    INFINITY_BITS,
    amax_bits,
    decode_e8m0,
    encode_e8m0,
    encode_fp32,
    magnitude_bits,
    magnitudes,
    reduce_max,
    round_to_format,
)
from tritonfp8.kernels.pdl import begin


@triton.jit
def packed_codes(x, QMAX: tl.constexpr, MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr):
    """``[m, blocks, n]`` float32 -> ``[m, blocks, n / 2]`` uint8, to nearest even and saturated; NaN becomes zero."""
    bits = magnitude_bits(x)
    magnitude = tl.minimum(bits, tl.full((), QMAX, tl.float32).to(tl.int32, bitcast=True))
    exponent = tl.maximum(magnitude >> 23, EMIN + 127)
    # 2^23 spacings of the format. float32 values there are one spacing apart, so the sum is rounded, and its low bits
    # count spacings. A carry into the next binade is the next code.
    anchor = (exponent + (23 - MANTISSA_BITS)) << 23
    total = magnitude.to(tl.float32, bitcast=True) + anchor.to(tl.float32, bitcast=True)
    codes = ((exponent - (EMIN + 127)) << MANTISSA_BITS) + (total.to(tl.int32, bitcast=True) - anchor)
    codes |= (x.to(tl.int32, bitcast=True) >> 28) & 8
    codes = tl.where(bits > INFINITY_BITS, 0, codes)
    low, high = tl.split(tl.reshape(codes, (x.shape[0], x.shape[1], x.shape[2] // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def unpacked_values(q, MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr):
    """``[m, blocks, n / 2]`` uint8 -> ``[m, blocks, n]`` float32."""
    pairs = tl.join(q & 15, q >> 4).to(tl.int32)
    codes = tl.reshape(pairs, (q.shape[0], q.shape[1], 2 * q.shape[2]))
    magnitude = codes & 7
    normal = ((magnitude << (23 - MANTISSA_BITS)) + ((EMIN + 126) << 23)).to(tl.float32, bitcast=True)
    subnormal = magnitude.to(tl.float32) * (2.0 ** (EMIN - MANTISSA_BITS))
    value = tl.where(magnitude < (1 << MANTISSA_BITS), subnormal, normal)
    return (value.to(tl.int32, bitcast=True) | ((codes & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _rows(pid_m, TILE_M: tl.constexpr):
    return (pid_m * TILE_M + tl.arange(0, TILE_M))[:, None]


@triton.jit
def _blocks(pid_n, COLS: tl.constexpr, TILE_N: tl.constexpr):
    return (pid_n * (TILE_N // COLS) + tl.arange(0, TILE_N // COLS))[None, :]


@triton.jit
def _elements(blocks, EACH: tl.constexpr):
    """Indices along a row of the elements of blocks, or of their bytes."""
    return blocks[:, :, None] * EACH + tl.arange(0, EACH)[None, None, :]


@triton.jit
def _load_scaled(
    q_rows, s_rows, is_row, blocks, K, stride_qk, stride_sk,
    COLS: tl.constexpr, MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr,
):  # fmt: skip
    """The values of the codes of a tile, float32, zeros beyond the edges; from pointers to rows of codes and scales."""
    halves = _elements(blocks, COLS // 2)
    mask = is_row[:, :, None] & (halves < K // 2)
    q = tl.load(q_rows[:, :, None] + halves.to(tl.int64) * stride_qk, mask=mask, other=0)
    mask = is_row & (blocks < tl.cdiv(K, COLS))
    scale = tl.load(s_rows + blocks.to(tl.int64) * stride_sk, mask=mask, other=127)
    return unpacked_values(q, MANTISSA_BITS, EMIN) * decode_e8m0(scale)[:, :, None]


@triton.jit
def _store(out_ptr, values, rows, blocks, M, K, COLS: tl.constexpr):
    """Store a tile of the contiguous ``out [M, K]``."""
    cols = _elements(blocks, COLS)
    mask = (rows < M)[:, :, None] & (cols < K)
    tl.store(out_ptr + rows.to(tl.int64)[:, :, None] * K + cols, values.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def quantize_packed_kernel(
    x_ptr, q_ptr, s_ptr, M, K, stride_xm, stride_xk, stride_qm, stride_qk, stride_sm, stride_sk,
    ROWS: tl.constexpr, COLS: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, E8M0: tl.constexpr, POW2: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Quantize ``x [M, K]``, K even, to ``q [M, K / 2]`` with a biased exponent for each block of COLS columns."""
    tl.static_assert(ROWS == 1 and E8M0)
    begin(DEPENDENT)
    pid_m, pid_n = tile_index(tl.program_id(0), M, K, TILE_M, TILE_N, 1)
    rows, blocks = _rows(pid_m, TILE_M), _blocks(pid_n, COLS, TILE_N)
    cols = _elements(blocks, COLS)
    offsets = rows.to(tl.int64)[:, :, None] * stride_xm + cols.to(tl.int64) * stride_xk
    x = tl.load(x_ptr + offsets, mask=(rows < M)[:, :, None] & (cols < K), other=0.0)
    found = amax_bits(reduce_max(magnitudes(x), 2), x.dtype)
    enc, scale = encode_e8m0(found, EMAX, QMAX_MANTISSA, POW2)
    q = packed_codes(x.to(tl.float32) * enc[:, :, None], QMAX, MANTISSA_BITS, EMIN)
    halves = _elements(blocks, COLS // 2)
    mask = (rows < M)[:, :, None] & (halves < K // 2)
    tl.store(q_ptr + rows.to(tl.int64)[:, :, None] * stride_qm + halves.to(tl.int64) * stride_qk, q, mask=mask)
    mask = (rows < M) & (blocks < tl.cdiv(K, COLS))
    tl.store(s_ptr + rows.to(tl.int64) * stride_sm + blocks.to(tl.int64) * stride_sk, scale, mask=mask)


@triton.jit
def dequantize_packed_kernel(
    q_ptr, s_ptr, out_ptr, M, K, stride_qm, stride_qk, stride_sm, stride_sk,
    COLS: tl.constexpr, MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``out [M, K] = q * 2^(s - 127)``, rounded once; ``out`` is contiguous."""
    begin(DEPENDENT)
    pid_m, pid_n = tile_index(tl.program_id(0), M, K, TILE_M, TILE_N, 1)
    rows, blocks = _rows(pid_m, TILE_M), _blocks(pid_n, COLS, TILE_N)
    q_rows, s_rows = q_ptr + rows.to(tl.int64) * stride_qm, s_ptr + rows.to(tl.int64) * stride_sm
    values = _load_scaled(q_rows, s_rows, rows < M, blocks, K, stride_qk, stride_sk, COLS, MANTISSA_BITS, EMIN)
    _store(out_ptr, values, rows, blocks, M, K, COLS)


@triton.jit
def expand_codes_kernel(
    q_ptr, s_ptr, out_ptr, scale_ptr, rounded_ptr, M, K, stride_qm, stride_qk, stride_sm, stride_sk,
    COLS: tl.constexpr, MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr,
    OUT_QMAX: tl.constexpr, OUT_MANTISSA_BITS: tl.constexpr, OUT_EMIN: tl.constexpr, DIRECT_CAST: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Codes with a scale a block -> 8-bit codes with a scale a row, a power of two; and the values that are rounded.

    A program takes TILE_M rows and reads them twice, the second time from cache.
    """
    begin(DEPENDENT)
    rows = _rows(tl.program_id(0), TILE_M)
    q_rows, s_rows = q_ptr + rows.to(tl.int64) * stride_qm, s_ptr + rows.to(tl.int64) * stride_sm
    largest = tl.zeros((TILE_M,), tl.int32)
    for pid_n in range(tl.cdiv(K, TILE_N)):
        blocks = _blocks(pid_n, COLS, TILE_N)
        values = _load_scaled(q_rows, s_rows, rows < M, blocks, K, stride_qk, stride_sk, COLS, MANTISSA_BITS, EMIN)
        largest = tl.maximum(largest, tl.max(tl.max(magnitude_bits(values), 2), 1))
    enc, scale = encode_fp32(largest, OUT_QMAX, True)
    rounded = tl.zeros((TILE_M,), tl.int32)
    for pid_n in range(tl.cdiv(K, TILE_N)):
        blocks = _blocks(pid_n, COLS, TILE_N)
        values = _load_scaled(q_rows, s_rows, rows < M, blocks, K, stride_qk, stride_sk, COLS, MANTISSA_BITS, EMIN)
        scaled = values * enc[:, None, None]
        nearest = scaled if DIRECT_CAST else round_to_format(scaled, OUT_MANTISSA_BITS, OUT_EMIN)
        codes = nearest.to(out_ptr.dtype.element_ty)
        # Of numbers of so few digits these are in the format that are multiples of its smallest one.
        multiples = scaled * (2.0 ** (OUT_MANTISSA_BITS - OUT_EMIN))
        rounded += tl.sum(tl.sum((multiples != tl.floor(multiples)).to(tl.int32), 2), 1)
        _store(out_ptr, codes, rows, blocks, M, K, COLS)
    tl.store(scale_ptr + rows, scale[:, None], mask=rows < M)
    # In a row with a NaN nothing is a number.
    tl.store(rounded_ptr + rows, tl.where(largest < INFINITY_BITS, rounded, 0)[:, None], mask=rows < M)
