"""Quantization by exact arithmetic, written from the standards only.

Scales are computed with fractions. An element times its encode factor is exact in float64 (24 + 24 bits). It is rounded
to float32 once, then to the nearest value of the format, ties to the even code.
"""

import functools
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

FLOAT32_FRACTION_BITS = 23
FLOAT32_MIN_EXPONENT = -126
LARGEST_ENCODE = Fraction(2) ** 126
E8M0_BIAS = 127
E8M0_NAN = 255
SIGN = 0x80
NAN = 0x7F


@dataclass(frozen=True)
class Layout:
    """Bits of a format of the OCP "8-bit Floating Point Specification" rev. 1.0, tables 1 and 2; or of OCP MX v1.0."""

    fraction_bits: int
    bias: int
    largest_code: int  # of a finite value
    sign: int = SIGN
    nan: int = NAN

    def value(self, code):
        """The value of a finite, non-negative code."""
        fraction = Fraction(code % 2**self.fraction_bits, 2**self.fraction_bits)
        exponent = code >> self.fraction_bits
        if exponent == 0:
            return fraction * Fraction(2) ** (1 - self.bias)
        return (1 + fraction) * Fraction(2) ** (exponent - self.bias)

    @functools.cached_property
    def values(self):
        """The values of all finite, non-negative codes, ascending."""
        return np.array([float(self.value(code)) for code in range(self.largest_code + 1)])

    @property
    def qmax(self):
        return self.value(self.largest_code)


LAYOUTS = {"e4m3": Layout(3, 7, 0x7E), "e5m2": Layout(2, 15, 0x7B), "e2m1": Layout(1, 1, 0x7, 0x8, 0x0)}


def floor_log2(x):
    """The exponent e with 2^e <= x < 2^(e + 1)."""
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= x else exponent - 1


def ceil_log2(x):
    """The smallest e with x <= 2^e."""
    exponent = floor_log2(x)
    return exponent if Fraction(2) ** exponent == x else exponent + 1


def round_to_float32(x):
    """Round a positive fraction to the nearest float32, ties to even, including subnormals."""
    unit = Fraction(2) ** (max(floor_log2(x), FLOAT32_MIN_EXPONENT) - FLOAT32_FRACTION_BITS)
    return round(x / unit) * unit


def encode(amax, spec):
    """``(enc, scale)`` of a finite amax, as fractions."""
    qmax = LAYOUTS[spec.format].qmax
    if spec.scale_format == "e8m0":
        if amax == 0:
            exponent = -E8M0_BIAS
        elif spec.scale_rounding == "pow2":
            exponent = ceil_log2(amax / qmax)
        else:
            exponent = floor_log2(amax) - floor_log2(qmax)
        scale = Fraction(2) ** min(max(exponent, -E8M0_BIAS), E8M0_BIAS)
        return 1 / scale, scale
    enc = Fraction(1) if amax == 0 else min(round_to_float32(qmax / amax), LARGEST_ENCODE)
    if spec.scale_rounding == "pow2":
        enc = Fraction(2) ** floor_log2(enc)
    return enc, round_to_float32(1 / enc)


def cast(x, enc, layout):
    """Codes (uint8) of float32 ``x`` times ``enc``: saturating, to the nearest value, ties to the even code."""
    with np.errstate(over="ignore"):
        product = (x.astype(np.float64) * float(enc)).astype(np.float32).astype(np.float64)
    magnitude, grid = np.abs(product), layout.values
    low = np.clip(np.searchsorted(grid, magnitude, side="right") - 1, 0, len(grid) - 1)
    high = np.minimum(low + 1, len(grid) - 1)
    below, above = magnitude - grid[low], grid[high] - magnitude
    take_high = (above < below) | ((above == below) & (low % 2 == 1))
    codes = np.where(take_high & (high > low), high, low).astype(np.uint8)
    return codes | np.where(np.signbit(product), layout.sign, 0).astype(np.uint8)


def _slices(size, block):
    step = max(size, 1) if block == -1 else block
    return [slice(start, min(start + step, size)) for start in range(0, max(size, 1) if block == -1 else size, step)]


def quantize(x, spec):
    """``(codes uint8, scales)`` of a float32 matrix, block by block; scales float32, or uint8 if e8m0."""
    layout = LAYOUTS[spec.format]
    rows, cols = (_slices(size, block) for size, block in zip(x.shape, spec.block, strict=True))
    e8m0 = spec.scale_format == "e8m0"
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros((len(rows), len(cols)), np.uint8 if e8m0 else np.float32)
    for i, row in enumerate(rows):
        for j, col in enumerate(cols):
            block = x[row, col]
            if not np.isfinite(block).all():
                codes[row, col] = layout.nan
                scales[i, j] = E8M0_NAN if e8m0 else np.nan
                continue
            enc, scale = encode(Fraction(float(np.abs(block).max(initial=0.0))), spec)
            codes[row, col] = cast(block, enc, layout)
            scales[i, j] = floor_log2(scale) + E8M0_BIAS if e8m0 else float(scale)
    # Two codes of 4 bits a byte, the first one in the low bits.
    return codes if layout.sign == SIGN else codes[:, ::2] | codes[:, 1::2] << 4, scales
