"""Device code shared by the casts: amax -> encode factor and scale, block reductions, the saturating cast.

Each helper equals its torch version in ``tritonfp8/reference/`` to the bit. An amax is the bits of a non-negative
float32 in an int32. As integers NaN orders above infinity, so a maximum keeps NaN, and an atomic maximum is exact in
any order.
"""

import triton
import triton.language as tl

INFINITY_BITS: tl.constexpr = tl.constexpr(0x7F800000)
MANTISSA_MASK: tl.constexpr = tl.constexpr(0x7FFFFF)
MAGNITUDE_MASK: tl.constexpr = tl.constexpr(0x7FFFFFFF)
NAN_BITS: tl.constexpr = tl.constexpr(0x7FC00000)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
MAX_ENCODE: tl.constexpr = tl.constexpr(2.0**126)
MAX_ENCODE_EXPONENT: tl.constexpr = tl.constexpr(126 + 127)


@triton.jit
def magnitude_bits(x):
    """Bits of ``|x|`` of a float32 tile."""
    return x.to(tl.int32, bitcast=True) & MAGNITUDE_MASK


@triton.jit
def magnitudes(x):
    """Magnitudes of a floating tile as integers of the same order: int16 for 16-bit floats, else float32 bits.

    int16 takes half the registers of float32, and one instruction for two elements if the compiler pairs them.
    """
    if x.dtype.primitive_bitwidth == 16:
        return x.to(tl.int16, bitcast=True) & 0x7FFF
    else:
        return magnitude_bits(x.to(tl.float32))


@triton.jit
def larger_or_nan(a, b):
    """The maximum of two floats, or NaN if one of them is NaN. It is one instruction; a maximum of bits takes two."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def magnitudes_of_codes(x):
    """Magnitudes of dequantized codes, float32, as bfloat16 in int16: exact from 2^-126 on, below that rounded up."""
    bits = magnitude_bits(x)
    return ((bits >> 16) | ((bits & 0xFFFF) != 0).to(tl.int32)).to(tl.int16)


@triton.jit
def amax_bits(values, dtype: tl.constexpr):
    """Magnitudes of ``dtype`` -> float32 bits."""
    if values.dtype == tl.int16:
        return values.to(dtype, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True)
    else:
        return values


@triton.jit
def logistic(x):
    """The sigmoid of a float32 tile, to a few units in the last place."""
    # exp2 and rsqrt are one instruction each; exp and a division are ten. An infinite exp2 gives 0.
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2_E))
    return root * root


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def reduce_max(values, AXIS: tl.constexpr, KEEP_DIMS: tl.constexpr = False):
    """``tl.max`` of integers in their own width, which ``tl.max`` widens to 32 bits; or of floats, keeping NaN."""
    if values.dtype.is_floating():
        return tl.reduce(values, AXIS, larger_or_nan, keep_dims=KEEP_DIMS)
    else:
        return tl.reduce(values, AXIS, _larger, keep_dims=KEEP_DIMS)


@triton.jit
def within_threads(values, R: tl.constexpr):
    """Maxima over the R rows of a tile that a thread has: threads then exchange R times fewer values."""
    L: tl.constexpr = values.shape[0] // R
    N: tl.constexpr = values.shape[1]
    return reduce_max(tl.reshape(values, (R, L, N)), 0) if R > 1 else values


@triton.jit
def _encode_pow2(bits, QMAX: tl.constexpr):
    """:func:`encode_fp32` with POW2 from exponents alone: the same bits without a division.

    ``QMAX / amax`` lies in the binade of the difference of their exponents, or one below if amax has the larger
    mantissa. With 24-bit mantissas no quotient below 1 rounds to 1, so the binade is exact.
    """
    qmax = tl.full((), QMAX, tl.float32).to(tl.int32, bitcast=True)
    exponent = tl.maximum(((bits - qmax + MANTISSA_MASK) >> 23) + 127, 254 - MAX_ENCODE_EXPONENT)
    exponent = tl.where(bits == 0, 127, exponent)
    finite = bits < INFINITY_BITS
    enc = tl.where(finite, (254 - exponent) << 23, NAN_BITS).to(tl.float32, bitcast=True)
    return enc, tl.where(finite, exponent << 23, NAN_BITS).to(tl.float32, bitcast=True)


@triton.jit
def encode_fp32(bits, QMAX: tl.constexpr, POW2: tl.constexpr):
    """amax bits -> (encode factor, scale), both float32."""
    if POW2:
        return _encode_pow2(bits, QMAX)
    else:
        return _encode_exact(bits, QMAX)


@triton.jit
def _encode_exact(bits, QMAX: tl.constexpr):
    amax = bits.to(tl.float32, bitcast=True)
    # Replace an amax of 0 by QMAX: the factor becomes 1.
    enc = tl.div_rn(tl.full(amax.shape, QMAX, tl.float32), tl.where(bits == 0, QMAX, amax))
    enc = tl.minimum(enc, MAX_ENCODE)
    finite = bits < INFINITY_BITS
    scale = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), tl.where(finite, enc, 1.0))
    nan = float("nan")
    return tl.where(finite, enc, nan), tl.where(finite, scale, nan)


@triton.jit
def encode_e8m0(bits, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr, ROUND_UP: tl.constexpr):
    """amax bits -> (encode factor float32, scale as a biased exponent in uint8)."""
    exponent = (bits >> 23) - EMAX
    if ROUND_UP:
        exponent += ((bits & MANTISSA_MASK) > QMAX_MANTISSA).to(tl.int32)
    exponent = tl.maximum(exponent, 0)
    finite = bits < INFINITY_BITS
    enc = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(finite, enc, float("nan")), tl.where(finite, exponent, 255).to(tl.uint8)


@triton.jit
def encode(
    bits, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr, E8M0: tl.constexpr, POW2: tl.constexpr
):
    """amax bits -> (encode factor float32, scale), float32 or with E8M0 a biased exponent."""
    if E8M0:
        return encode_e8m0(bits, EMAX, QMAX_MANTISSA, POW2)
    else:
        return encode_fp32(bits, QMAX, POW2)


@triton.jit
def decode_e8m0(scale):
    """Biased exponents (uint8) -> float32. 0 is the subnormal 2^-127, 255 is NaN."""
    bits = scale.to(tl.int32)
    value = tl.where(bits == 0, 0x400000, bits << 23).to(tl.float32, bitcast=True)
    return tl.where(bits == 255, float("nan"), value)


@triton.jit
def block_amax(bits, R: tl.constexpr, C: tl.constexpr):
    """Maximum of each R x C block: bits ``[M, N]`` -> ``[M // R, N // C]``."""
    M: tl.constexpr = bits.shape[0]
    N: tl.constexpr = bits.shape[1]
    if C == N:
        rows = tl.max(bits, 1)
        return tl.max(tl.reshape(rows, (M // R, R)), 1)[:, None] if R > 1 else rows[:, None]
    elif R == M:
        cols = tl.max(bits, 0)
        return tl.max(tl.reshape(cols, (N // C, C)), 1)[None, :] if C > 1 else cols[None, :]
    else:
        return tl.max(tl.max(tl.reshape(bits, (M // R, R, N // C, C)), 3), 1)


@triton.jit
def scale_blocks(x, enc, R: tl.constexpr, C: tl.constexpr):
    """Multiply each R x C block of ``x [M, N]`` by its factor, ``enc [M // R, N // C]``."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    if (R == 1 or R == M) and (C == 1 or C == N):
        return x * enc
    else:
        blocks = tl.reshape(x, (M // R, R, N // C, C)) * tl.reshape(enc, (M // R, 1, N // C, 1))
        return tl.reshape(blocks, (M, N))


@triton.jit
def round_to_format(x, MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr):
    """Round float32 to nearest even in a narrower format; the result stays float32.

    For devices without a direct conversion (sm_89): Triton converts there through float16, which would round twice.
    """
    bits = magnitude_bits(x)
    exponent = tl.maximum(bits >> 23, EMIN + 127)
    # The anchor is 2^23 spacings of the format. float32 values there are one spacing apart, so the sum is rounded.
    anchor = ((exponent + (23 - MANTISSA_BITS)) << 23).to(tl.float32, bitcast=True)
    rounded = (bits.to(tl.float32, bitcast=True) + anchor) - anchor
    signed = rounded.to(tl.int32, bitcast=True) | (x.to(tl.int32, bitcast=True) & ~0x7FFFFFFF)
    return tl.where(bits > INFINITY_BITS, x, signed.to(tl.float32, bitcast=True))


@triton.jit
def saturate(x, QMAX: tl.constexpr):
    """Clamp to ``[-QMAX, QMAX]``. NaN passes through, because comparisons with NaN are false."""
    x = tl.where(x > QMAX, QMAX, x)
    return tl.where(x < -QMAX, -QMAX, x)
