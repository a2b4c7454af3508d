"""Casts in plain torch, on any device, with the signatures of the ops. The kernels agree with them to the bit.

All steps are float32, in IEEE arithmetic with round to nearest even:

    amax  = max |x| over the block                                   NaN or infinite if the block has one
    enc   = min(qmax / amax, 2^126), or 1 where amax is 0
    pow2:   enc = 2^floor(log2 enc)
    q     = cast(clamp(x * enc, -qmax, qmax))
    scale = 1 / enc

e8m0 scales are powers of two, clamped to [2^-127, 2^127], with enc = 1 / scale:

    pow2:   the smallest scale with amax / scale <= qmax             "RCEIL"
    floor:  scale = 2^(floor(log2 amax) - emax)                      OCP MX v1.0, section 6.3
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tritonfp8.specs import QuantSpec, check_transposable, empty_scale, full_block, moves_codes, spec_of
from tritonfp8.specs.formats import FORMATS, SCALE_FORMATS, Format

INFINITY_BITS = 0x7F800000
MANTISSA_MASK = 0x7FFFFF
MAGNITUDE_MASK = 0x7FFFFFFF
MAX_ENCODE = 2.0**126


def _blocked(x: Tensor, block: Sequence[int]) -> Tensor:
    """``x`` zero-padded to whole blocks and viewed as ``[n0, b0, n1, b1, ...]``."""
    full = [max(d, 1) if b == -1 else b for d, b in zip(x.shape, full_block(x.ndim, block), strict=True)]
    counts = [
        max(-(-d // b), 1 if whole == -1 else 0)
        for d, b, whole in zip(x.shape, full, full_block(x.ndim, block), strict=True)
    ]
    padding = [
        p for d, b, n in zip(reversed(x.shape), reversed(full), reversed(counts), strict=True) for p in (0, n * b - d)
    ]
    return F.pad(x, padding).reshape([size for pair in zip(counts, full, strict=True) for size in pair])


def spread(per_block: Tensor, shape: Sequence[int], block: Sequence[int]) -> Tensor:
    """One value a block, repeated so that it broadcasts over a tensor of ``shape``."""
    for dim, (size, b) in enumerate(zip(shape, full_block(len(shape), block), strict=True)):
        if b > 1:
            per_block = per_block.repeat_interleave(b, dim).narrow(dim, 0, size)
    return per_block


def amax(x: Tensor, block: Sequence[int]) -> Tensor:
    """Largest magnitude of each block.

    Args:
        x: ``[..., K]``, any floating dtype.
        block: ``(rows, cols)``; see :class:`~tritonfp8.QuantSpec`.

    Returns:
        float32, one value a block; 0 for an empty block, infinite or NaN if the block has such a value.
    """
    return _block_amax(x, block)


def _block_amax(x: Tensor, block: Sequence[int]) -> Tensor:
    # A maximum of the bits as integers: non-negative floats keep their order, and NaN is above infinity, so it stays.
    bits = _blocked(x.float().abs().view(torch.int32), block)
    found = bits.amax(dim=tuple(range(1, bits.ndim, 2))).view(torch.float32)
    return torch.where(found.isnan(), torch.nan, found)


def _without_sign(amax: Tensor) -> Tensor:
    # The sign bit would make -NaN a negative integer, which the checks below take for a finite value.
    return (amax.view(torch.int32) & MAGNITUDE_MASK).view(torch.float32)


def _encode_fp32(amax: Tensor, fmt: Format, scale_rounding: str) -> tuple[Tensor, Tensor]:
    enc = torch.where(amax == 0, torch.ones_like(amax), torch.full_like(amax, fmt.qmax) / amax).clamp(max=MAX_ENCODE)
    if scale_rounding == "pow2":
        enc = (enc.view(torch.int32) & ~MANTISSA_MASK).view(torch.float32)
    # NaN is written, not computed: the payload that arithmetic leaves in a NaN differs by device.
    finite = amax.view(torch.int32) < INFINITY_BITS
    return torch.where(finite, enc, torch.nan), torch.where(finite, 1.0 / enc, torch.nan)


def _encode_e8m0(amax: Tensor, fmt: Format, scale_rounding: str) -> tuple[Tensor, Tensor]:
    bits = amax.view(torch.int32)
    exponent = (bits >> 23) - fmt.emax
    if scale_rounding == "pow2":
        exponent = exponent + ((bits & MANTISSA_MASK) > fmt.qmax_mantissa).int()
    # The largest biased exponent, 254 - 2 + 1, is below the upper clamp of 254 in every format.
    exponent = exponent.clamp(min=0)
    finite = bits < INFINITY_BITS
    enc = torch.where(finite, ((254 - exponent) << 23).view(torch.float32), torch.nan)
    return enc, torch.where(finite, exponent, 255).to(torch.uint8).view(torch.float8_e8m0fnu)


def encode(amax: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """The factor of each block that is multiplied before the cast, float32; and the scale as ``spec`` stores it."""
    of_scale = _encode_e8m0 if SCALE_FORMATS[spec.scale_format].exponent_only else _encode_fp32
    return of_scale(_without_sign(amax), FORMATS[spec.format], spec.scale_rounding)


def codes_of(scaled: Tensor, fmt: Format) -> Tensor:
    """The codes of float32 values as uint8, rounded to nearest even and saturated; packed if a byte holds several."""
    if fmt.codes_a_byte > 1:
        return _packed(scaled, fmt)
    codes = scaled.clamp(-fmt.qmax, fmt.qmax).to(fmt.dtype).view(torch.uint8)
    return torch.where(scaled.isnan(), fmt.nan, codes)


def _packed(scaled: Tensor, fmt: Format) -> Tensor:
    magnitude = scaled.abs().clamp(max=fmt.qmax)
    exponent = ((magnitude.view(torch.int32) >> 23) - 127).clamp(min=fmt.emin)
    # In units of the last place of the format. A carry into the next binade is the next code.
    steps = torch.ldexp(magnitude, fmt.mantissa_bits - exponent).round()
    codes = ((exponent - fmt.emin) << fmt.mantissa_bits) + steps.int() + (scaled.signbit().int() << fmt.sign_bit)
    codes = torch.where(scaled.isnan(), fmt.nan, codes).to(torch.uint8)
    width = 8 // fmt.codes_a_byte
    parts = codes.unflatten(-1, (-1, fmt.codes_a_byte)).unbind(-1)
    return functools.reduce(torch.bitwise_or, (part << (width * i) for i, part in enumerate(parts)))


def values_of(qdata: Tensor, fmt: Format) -> Tensor:
    """The values of codes without their scales, float32, ``[..., K]``; ``qdata`` may be packed."""
    if fmt.codes_a_byte == 1:
        return qdata.float()
    width = 8 // fmt.codes_a_byte
    codes = torch.stack([qdata >> (width * i) for i in range(fmt.codes_a_byte)], -1).flatten(-2).int()
    exponent = (codes >> fmt.mantissa_bits) & ((1 << (fmt.sign_bit - fmt.mantissa_bits)) - 1)
    mantissa = (codes & ((1 << fmt.mantissa_bits) - 1)) + ((exponent > 0).int() << fmt.mantissa_bits)
    magnitude = torch.ldexp(mantissa.float(), exponent.clamp(min=1) - 1 + fmt.emin - fmt.mantissa_bits)
    return torch.where((codes >> fmt.sign_bit) & 1 == 1, -magnitude, magnitude)


def quantize(
    x: Tensor,
    spec: str,
    transpose: bool = False,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize ``x``, or ``x.T`` if ``transpose``; see :func:`tritonfp8.quantize`.

    Args:
        x: ``[..., K]``, any floating dtype; 2-D if ``transpose``.
        spec: the text of a :class:`~tritonfp8.QuantSpec`.
        transpose: quantize ``x.T``.
        amax: float32, one value for each block of the result, used in place of the block's own amax. Its sign is
            ignored, also the sign of zero, infinity and NaN.

    Returns:
        ``(qdata, scale)``; qdata ``[..., K]``, or ``[..., K / 2]`` uint8 for a format of two codes a byte.
    """
    s = spec_of(spec, packed=True)
    fmt = FORMATS[s.format]
    x = (x.t() if transpose else x).float()
    s.qdata_shape(x.shape)
    enc, scale = encode(_block_amax(x, s.block) if amax is None else amax, s)
    codes = codes_of(x * spread(enc, x.shape, s.block), fmt)
    return codes.contiguous().view(fmt.dtype), empty_scale(x.shape, s.block, s.scale_format, x.device).copy_(scale)


def quantize_into(qdata: Tensor, scale: Tensor, x: Tensor, spec: str) -> None:
    """Write :func:`quantize` of ``x`` over codes and scales that exist.

    Args:
        qdata: as :func:`quantize` returns it, with any strides.
        scale: as :func:`quantize` returns it, with any strides.
        x: ``[..., K]``, any floating dtype.
        spec: the text of a :class:`~tritonfp8.QuantSpec`.
    """
    for target, found in zip((qdata, scale), quantize(x, spec), strict=True):
        target.copy_(found)


def quantize_both(x: Tensor, spec: str, spec_t: str, codes: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``x [M, N]`` and ``x.T``: ``(*quantize(x, spec), *quantize(x, spec_t, transpose=True))``, four tensors.

    With ``codes`` the second pair is :func:`~tritonfp8.reference.transpose_codes` of the first.
    """
    spec_of(spec), spec_of(spec_t)
    pair = quantize(x, spec)
    return *pair, *(transposed_codes(*pair, spec, spec_t) if codes else quantize(x, spec_t, transpose=True))


def quantize_both_sum(
    x: Tensor, spec: str, spec_t: str, codes: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``(*quantize_both(x, spec, spec_t, codes), x.sum(0))``. The order in which a GPU sums is not defined."""
    return *quantize_both(x, spec, spec_t, codes), x.sum(0)


def quantize_with_amax(x: Tensor, spec: str, spec_t: str, codes: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """``(*quantize(x, spec), amax)`` of ``x [M, N]``.

    ``amax`` is float32, of the blocks of ``x.T`` by ``spec_t``: ``quantize(x, spec_t, True, amax)`` is the cast of the
    transpose. With ``codes`` it is the amax of the dequantized codes, for
    :func:`~tritonfp8.reference.transpose_codes`; amaxes below 2^-126
    are rounded up to bfloat16, which changes no scale.
    """
    spec_of(spec)
    qdata, scale = quantize(x, spec)
    values = dequantize(qdata, scale, spec, torch.float32) if codes else x
    found = amax(values.t(), spec_of(spec_t).block)
    return qdata, scale, rounded_up(found) if codes else found


def rounded_up(amax: Tensor) -> Tensor:
    """Amaxes of dequantized codes, float32, as 16 bits hold them: exact from 2^-126 on, below that rounded up.

    A code has less than 8 bits of mantissa. Amaxes below 2^-117 all have the smallest scale, so no scale changes.
    """
    bits = amax.view(torch.int32)
    return (((bits >> 16) | ((bits & 0xFFFF) != 0)) << 16).view(torch.float32)


def transposed_codes(
    x: Tensor, scale: Tensor, spec: str, spec_t: str, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`~tritonfp8.reference.transpose_codes` of one matrix."""
    s, s_t = spec_of(spec), spec_of(spec_t)
    check_transposable(s, s_t)
    qdata = codes_by(x, scale, s)
    if moves_codes(s, s_t):
        return transpose(qdata), scale.t().clone(memory_format=torch.contiguous_format)
    return quantize(dequantize(qdata, scale, spec, torch.float32), spec_t, True, amax)


def codes_by(x: Tensor, scale: Tensor, spec: QuantSpec) -> Tensor:
    """The codes of ``x`` whose scales, powers of two, are known; ``x`` itself if it is codes."""
    fmt = FORMATS[spec.format]
    if x.dtype == fmt.dtype:
        return x
    # The inverse of a power of two is exact.
    codes = codes_of(x.float() * spread(1.0 / scale.float(), x.shape, spec.block), fmt)
    return codes.contiguous().view(fmt.dtype)


def quantize_weights(
    x: Tensor, others: Sequence[Tensor], spec: str, scales: Sequence[Tensor], codes: str | None = None
) -> list[Tensor]:
    """``quantize(each, spec, transpose=True)`` of ``x`` and of each of ``others``: qdata, scale, qdata, scale, ...

    With ``codes``, a spec, ``scales`` are of the codes that the matrices have by it, and each result is
    ``transpose_codes(each, scale, codes, spec)``. Else ``scales`` is empty.
    """
    spec_of(spec)
    if codes is None:
        return [tensor for each in (x, *others) for tensor in quantize(each, spec, transpose=True)]
    pairs = zip((x, *others), scales, strict=True)
    return [tensor for each, scale in pairs for tensor in transposed_codes(each, scale, codes, spec)]


def dequantize(qdata: Tensor, scale: Tensor, spec: str, dtype: torch.dtype) -> Tensor:
    """``float32(qdata) * float32(scale)``, rounded to ``dtype``.

    Args:
        qdata: ``[..., K]``, 8-bit; or ``[..., K / 2]``, two codes a byte.
        scale: one value a block.
        spec: the text of a :class:`~tritonfp8.QuantSpec`.
        dtype: any floating dtype.

    Returns:
        ``dtype``, ``[..., K]``; infinite where the result is beyond float32 or ``dtype``. The largest
        float32 values may have a code and scale that stand for 2^128 (see :class:`~tritonfp8.QuantSpec`).
    """
    s = spec_of(spec, packed=True, read=True)
    values = values_of(qdata, FORMATS[s.format])
    return (values * spread(scale.float(), values.shape, s.block)).to(dtype)


def transpose(qdata: Tensor) -> Tensor:
    """``qdata [M, N]``, 8-bit, as a contiguous copy ``[N, M]``.

    This transposes a tensor quantized in square blocks without rounding again; its scale is transposed the same way.
    """
    return qdata.view(torch.uint8).t().clone(memory_format=torch.contiguous_format).view(qdata.dtype)
