"""Values of codes: read from codes, or from the values that codes are made of by scales that are known."""

import triton
import triton.language as tl

from tritonfp8.kernels.cast.quantize import Encoding, group_offsets, spread, spread_amax, spread_scale
from tritonfp8.kernels.numerics import decode_e8m0, round_to_format, saturate


@triton.jit
def amax_of_codes(x, ENCODING: tl.constexpr, R: tl.constexpr):
    """amax bits of the blocks of a spread tile of the values of codes."""
    return spread_amax(tl.abs(x), ENCODING.ROWS, ENCODING.COLS, R).to(tl.int32, bitcast=True)


@triton.jit
def values_of_codes(q, scale, ENCODING: tl.constexpr, R: tl.constexpr):
    """A spread tile of codes times the scales of its blocks, float32."""
    factors = decode_e8m0(scale) if ENCODING.E8M0 else scale
    return spread_scale(q.to(tl.float32), factors, ENCODING.ROWS, ENCODING.COLS, R)


@triton.jit
def codes_by(x, scale, ENCODING: tl.constexpr, DTYPE: tl.constexpr, R: tl.constexpr):
    """The codes, of DTYPE, that a spread tile has by the scales of its blocks."""
    factors = decode_e8m0(scale) if ENCODING.E8M0 else scale
    # Exact: the scales are powers of two.
    enc = tl.div_rn(tl.full(factors.shape, 1.0, tl.float32), factors)
    x = spread_scale(x.to(tl.float32), enc, ENCODING.ROWS, ENCODING.COLS, R)
    if not ENCODING.DIRECT_CAST:
        x = round_to_format(saturate(x, ENCODING.QMAX), ENCODING.MANTISSA_BITS, ENCODING.EMIN)
    return x.to(DTYPE)


@triton.jit
def values_by_scales(
    x, pid_m, pid_n, side, ENCODING: tl.constexpr, CODES: tl.constexpr, DTYPE: tl.constexpr, R: tl.constexpr
):
    """The values of a spread tile of codes, float32; without CODES ``x`` is quantized first, to DTYPE by the scales."""
    group_m = group_offsets(pid_m, x.shape[0], ENCODING.ROWS)
    # A tile may be a part of its block.
    group_n = (
        pid_n * x.shape[1] // ENCODING.COLS + tl.arange(0, 1)
        if x.shape[1] < ENCODING.COLS
        else group_offsets(pid_n, x.shape[1], ENCODING.COLS)
    )
    mask = (group_m < side.groups_m)[:, None] & (group_n < side.groups_n)[None, :]
    offsets = group_m.to(tl.int64)[:, None] * side.stride_sm + group_n.to(tl.int64)[None, :] * side.stride_sn
    # 1 beyond the edge, so that zeros there stay zeros.
    scale = tl.load(side.s_ptr + offsets, mask=mask, other=127 if ENCODING.E8M0 else 1.0)
    scale = spread(scale, R) if ENCODING.ROWS == 1 else scale
    return values_of_codes(x if CODES else codes_by(x, scale, ENCODING, DTYPE, R), scale, ENCODING, R)


@triton.jit
def values_by_rows(
    x, s_ptr, rows, M, QMAX: tl.constexpr, MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, DIRECT_CAST: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """The values of the codes, of DTYPE, that ``rows`` of a matrix of ``M`` rows have by a float32 scale each."""
    encoding: tl.constexpr = Encoding(1, -1, QMAX, 0, 0, MANTISSA_BITS, EMIN, False, True, DIRECT_CAST)
    scale = tl.load(s_ptr + rows, mask=rows < M, other=1.0)[:, None]
    return values_of_codes(codes_by(x, scale, encoding, DTYPE, 1), scale, encoding, 1)
