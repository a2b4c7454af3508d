"""AdamW on weights that are stored in 8 bits, in plain torch: dequantize, step in float32, quantize again.

With ``numbers = (decay, a, b2, b, step, c, eps)``, all of it in float32:

    p = code * (scale * decay)             decay = 1 - lr * weight_decay
    m = m + (grad - m) * a                 a = 1 - beta1
    v = v * b2 + grad * grad * b           b2 = beta2, b = 1 - beta2
    p = p - m / (sqrt(v) * c + eps) * step    c = 1 / sqrt(1 - beta2^t), step = lr / (1 - beta1^t)

That is AdamW of Loshchilov and Hutter ("Decoupled Weight Decay Regularization", 2019, algorithm 2). Then ``p``, ``m``
and ``v`` are rounded to the formats they are stored in, each by random bits of its own. The bits are a hash of a key
and of row and column of an element in the whole weight, so they do not depend on how a weight is sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tritonfp8.reference import casts
from tritonfp8.specs import BLOCK_1X128, QuantSpec, spec_of
from tritonfp8.specs.formats import FORMATS, SCALE_FORMATS, Format

MOMENT = QuantSpec("e4m3", BLOCK_1X128, "fp32", "pow2")
"""How 8-bit moments are quantized. Their scales are kept as exponents, one byte each."""
RANDOM_BITS = 20
"""Bits of the random number that rounds a value."""
MULTIPLIERS = (0x7FEB352D, 0x846CA68B, 0x9E3779B1)
"""Of the hash: the first two are from C. Wellons' ``lowbias32``, the third is 2^32 over the golden ratio."""
RANDOM_GROUP = 8
"""Columns that share a state, from which their random numbers are made."""
GENERATOR = 0xAC564B05
"""A multiplier whose successive values have a good lattice modulo 2^32: P. L'Ecuyer, "Tables of linear congruential
generators of different sizes and good lattice structure", 1999, table 4."""
WORD = 0xFFFFFFFF
# An addition to the largest pattern of a NaN would make it a negative number.
_QUIET_NAN = 0x7FC00000


def hash32(x: Tensor) -> Tensor:
    """``lowbias32`` of 32-bit words, which are kept as int64: a bijection whose output bits look independent."""
    x = (x ^ (x >> 16)) * MULTIPLIERS[0] & WORD
    x = (x ^ (x >> 15)) * MULTIPLIERS[1] & WORD
    return x ^ (x >> 16)


def rounding_keys(seed: int, steps: Tensor, weights: Tensor) -> Tensor:
    """The keys of the random bits of a step.

    Args:
        seed: 64 bits count.
        steps: ``[P]``, the number of the step for each weight.
        weights: int64 ``[P]``, which differ by weight.

    Returns:
        int32 ``[P, 2]``.
    """
    key = hash32(torch.full_like(weights, seed & WORD))
    for word in (torch.full_like(weights, seed >> 32 & WORD), steps.long() & WORD, steps.long() >> 32, weights):
        key = hash32(key ^ word)
    return torch.stack([key, hash32(key ^ MULTIPLIERS[2])], 1).to(torch.int32)


def random_states(keys: Tensor, shape: Sequence[int], place: Sequence[int]) -> Tensor:
    """The state of each element, int64 of 32 random bits, which the columns of a :data:`RANDOM_GROUP` share.

    Along a row the counter of groups is a Weyl sequence. Rows begin at random places of the sequence, so some overlap:
    the number that is added later keeps those apart.

    Args:
        keys: int32 ``[2]``, of :func:`rounding_keys`.
        shape: of the elements, ``[n, k]``.
        place: row and column of the first one in the whole weight.
    """
    (n, k), device = shape, keys.device
    first, second = (keys.long() & WORD)[:2].unbind()
    rows = torch.arange(place[0], place[0] + n, device=device)[:, None] & WORD
    cols = torch.arange(place[1], place[1] + k, device=device)[None, :]
    return states_of(hash32(rows ^ first), cols // RANDOM_GROUP, second)


def states_of(row: Tensor, group: Tensor, second: Tensor) -> Tensor:
    """States from random words of rows, from the index of a :data:`RANDOM_GROUP`, and from one more random word."""
    x = row + group * MULTIPLIERS[2] & WORD
    x = (x ^ (x >> 16)) * MULTIPLIERS[0] + row * MULTIPLIERS[1] + second & WORD
    return x ^ (x >> 15)


def random_bits(keys: Tensor, shape: Sequence[int], place: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Random numbers of :data:`RANDOM_BITS` bits that round code, first and second moment of each element, int64.

    From the state of a group (:func:`random_states`, with the same arguments) a multiplicative generator makes a word
    for the code of each of its columns, then for the first moments, then for the second ones. The first bits of a word
    are the random number.
    """
    states = random_states(keys, shape, place)
    at = torch.arange(place[1], place[1] + shape[1], device=keys.device)
    code, mean, square = (bits_of(states, at, i) for i in range(3))
    return code, mean, square


def bits_of(states: Tensor, at: Tensor, use: int) -> Tensor:
    """The random numbers of elements in the columns ``at``, for one of three uses, from their states."""
    powers = [pow(GENERATOR, 1 + i, 1 << 32) for i in range(3 * RANDOM_GROUP)]
    by = torch.tensor(powers, device=states.device).view(3, RANDOM_GROUP)
    return (states * by[use, at % RANDOM_GROUP] & WORD) >> 32 - RANDOM_BITS


def round_to_code(x: Tensor, fmt: Format, bits: Tensor | None) -> Tensor:
    """``x``, float32 of at most ``fmt.qmax``, rounded to values of ``fmt``.

    Without ``bits`` to the nearest one, a tie away from zero; else up with a probability that is the distance from the
    lower one over their spacing.
    """
    lost, least = 23 - fmt.mantissa_bits, 2.0**fmt.emin
    # From ``least`` on, the bits of a float32 that its code lacks are the last ones; so are they of ``least + x``.
    magnitude = x.abs()
    shift = torch.where(magnitude < least, least, 0.0)
    pattern = (magnitude + shift).view(torch.int32).clamp(max=_QUIET_NAN)
    added = 1 << (lost - 1) if bits is None else bits.to(torch.int32) << (lost - RANDOM_BITS)
    rounded = (pattern + added & -(1 << lost)).view(torch.float32) - shift
    return rounded.copysign(x)


def round_to_bfloat16(x: Tensor, bits: Tensor | None) -> Tensor:
    """As :func:`round_to_code` to bfloat16; infinities and NaN stay."""
    pattern = x.view(torch.int32).clamp(max=_QUIET_NAN)
    added = 0x8000 if bits is None else (bits >> (RANDOM_BITS - 16)).to(torch.int32)
    return (pattern + added >> 16).to(torch.int16).view(torch.bfloat16)


def read_moment(values: Tensor, exponents: Tensor | None, is_square: bool) -> Tensor:
    """The float32 values of a moment; see :func:`adamw` for how it is stored."""
    if exponents is None:
        return values.float()
    scale = (exponents.to(torch.int32) << 23).view(torch.float32)
    scale = torch.where(exponents == 255, torch.nan, scale)
    found = casts.dequantize(values, scale, *MOMENT.args, torch.float32)
    return found * found if is_square else found


def write_moment(
    x: Tensor, values: Tensor, exponents: Tensor | None, is_square: bool, bits: Tensor | None = None
) -> None:
    """Store the float32 values of a moment in place; see :func:`adamw` for how it is stored."""
    if exponents is None:
        values.copy_(round_to_bfloat16(x, bits) if values.dtype == torch.bfloat16 else x)
        return
    x = _sqrt(x) if is_square else x
    fmt = FORMATS[MOMENT.format]
    enc, scale = casts.encode(casts.amax(x, MOMENT.block), MOMENT)
    scaled = x * casts.spread(enc, x.shape, MOMENT.block)
    rounded = round_to_code(scaled, fmt, bits)
    if is_square:
        # A zero in the denominator of the step would make it infinite.
        rounded = torch.where(scaled > 0, rounded.clamp(min=2.0 ** (fmt.emin - fmt.mantissa_bits)), rounded)
    values.view(torch.uint8).copy_(casts.codes_of(rounded, fmt))
    exponents.copy_(scale.view(torch.int32) >> 23)


def _sqrt(x: Tensor) -> Tensor:
    # torch's float32 root on a CPU with AVX512 is not always the nearest; a root in float64, rounded, is.
    return x.double().sqrt().float()


def _stepped(
    qdata: Tensor, scale: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, exp_avg_scale: Tensor | None,
    exp_avg_sq_scale: Tensor | None, grad: Tensor, numbers: Tensor, scale_block: Sequence[int], fmt: Format,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Weight and moments after the step, in float32."""
    decay, a, b2, b, step, c, eps = numbers[:7].unbind()
    grad = grad.float()
    p = casts.values_of(qdata, fmt)
    p = p * casts.spread(scales_of(scale) * decay, p.shape, scale_block)
    m, v = read_moment(exp_avg, exp_avg_scale, False), read_moment(exp_avg_sq, exp_avg_sq_scale, True)
    m = m + (grad - m) * a
    v = v * b2 + grad * grad * b
    return p - m / (_sqrt(v) * c + eps) * step, m, v


def scales_of(scale: Tensor) -> Tensor:
    """Scales in float32, from float32 or from exponents in one byte."""
    if scale.dtype == torch.float32:
        return scale
    exponents = scale.view(torch.uint8).to(torch.int32)
    # 2^-127, the smallest of e8m0, is subnormal in float32.
    found = torch.where(exponents == 0, 1 << 22, exponents << 23).view(torch.float32)
    return torch.where(exponents == 255, torch.nan, found)


def _blocks(x: Tensor, place: Sequence[int], block: Sequence[int]) -> tuple[Tensor, int, int]:
    """``x`` with zeros before it, so that its blocks are blocks of the whole weight; and how many zeros."""
    above, left = (0 if size == -1 else at % size for at, size in zip(place, block, strict=True))
    return F.pad(x, (left, 0, above, 0)), above, left


def adamw_amax(
    qdata: Tensor, scale: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, numbers: Tensor, spec: str,
    scale_block: Sequence[int], place: Sequence[int], exp_avg_scale: Tensor | None = None,
    exp_avg_sq_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The amaxes of the weight that :func:`adamw` would make, whose arguments these are; nothing is written.

    Returns:
        float32, one value for each block of ``spec`` that the elements lie in. Blocks divide the whole weight.
    """
    s = spec_of(spec)
    args = (exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, grad, numbers, scale_block, FORMATS[s.format])
    p = _stepped(qdata, scale, *args)[0]
    return casts.amax(_blocks(p, place, s.block)[0], s.block)


def adamw(
    qdata: Tensor, scale: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, numbers: Tensor, keys: Tensor,
    spec: str, scale_block: Sequence[int], place: Sequence[int], stochastic: bool, exp_avg_scale: Tensor | None = None,
    exp_avg_sq_scale: Tensor | None = None, amax: Tensor | None = None,
) -> None:  # fmt: skip
    """One step of a weight, or of the part of it on this rank; weight and moments are written in place.

    Args:
        qdata: codes ``[n, k]``, contiguous; or ``[n, k / 2]``, two codes a byte, rounded by :func:`quantize_at_random`,
            or to nearest as by ``quantize_into``.
        scale: of the codes, float32 or exponents in one byte, one for each ``scale_block``.
        exp_avg: ``[n, k]``, float32, bfloat16 or, with ``exp_avg_scale``, e4m3.
        exp_avg_sq: like ``exp_avg``. In e4m3 it has square roots: the squares have twice the range in octaves.
        grad: ``[n, k]``, any floating dtype.
        numbers: float32 ``[7]`` or more.
        keys: int32 ``[2]`` or more, of :func:`rounding_keys`.
        spec: the text of the :class:`~tritonfp8.QuantSpec` of the weight.
        scale_block: rows and columns of the elements that share a scale, -1 for all.
        place: row and column of the first element in the whole weight.
        stochastic: round by random bits, else to nearest.
        exp_avg_scale: uint8 ``[n, ceil(k / 128)]``, the exponents of the scales.
        exp_avg_sq_scale: like ``exp_avg_scale``.
        amax: float32, of each block of ``spec`` that the elements lie in (:func:`adamw_amax`), where others have a
            part of a block; else the elements decide.
    """
    s = spec_of(spec, packed=True)
    fmt = FORMATS[s.format]
    args = (exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, grad, numbers, scale_block, fmt)
    p, m, v = _stepped(qdata, scale, *args)
    drawn = random_bits(keys, p.shape, place) if stochastic else (None, None, None)
    if fmt.codes_a_byte > 1:
        write_moment(m, exp_avg, exp_avg_scale, False, drawn[1])
        write_moment(v, exp_avg_sq, exp_avg_sq_scale, True, drawn[2])
        if stochastic:
            quantize_at_random(qdata, scale, p, keys, spec, place)
        else:
            casts.quantize_into(qdata, scale.view(SCALE_FORMATS[s.scale_format].dtype), p, spec)
        return
    padded, above, left = _blocks(p, place, s.block)
    enc, new = casts.encode(casts.amax(padded, s.block) if amax is None else amax, s)
    scaled = (padded * casts.spread(enc, padded.shape, s.block))[above:, left:]
    rounded = round_to_code(scaled.clamp(-fmt.qmax, fmt.qmax), fmt, drawn[0])
    write_moment(m, exp_avg, exp_avg_scale, False, drawn[1])
    write_moment(v, exp_avg_sq, exp_avg_sq_scale, True, drawn[2])
    qdata.view(torch.uint8).copy_(casts.codes_of(rounded, fmt))
    _write_scales(scale, new, qdata.shape, s.block, scale_block, (above, left))


def quantize_at_random(qdata: Tensor, scale: Tensor, x: Tensor, keys: Tensor, spec: str, place: Sequence[int]) -> None:
    """Write over codes of several a byte the codes of ``x``, each rounded up or down at random.

    The scale of a block is the smallest power of two by which its largest value is in the format ("pow2"), whatever
    the rounding of ``spec``: a value that saturates would be below itself in the mean. The random bits are those of
    the codes in :func:`adamw`.

    Args:
        qdata: codes ``[n, k / 2]``.
        scale: exponents in one byte, of the codes.
        x: ``[n, k]``, any floating dtype.
        keys: int32 ``[2]`` or more, of :func:`rounding_keys`.
        spec: the text of the :class:`~tritonfp8.QuantSpec` of the codes.
        place: row and column of the first element in the whole weight.

    Raises:
        ValueError: a spec of codes of 8 bits, which :func:`adamw` steps.
    """
    s = check_packed(spec)
    fmt, x = FORMATS[s.format], x.float()
    enc, new = casts.encode(casts.amax(x, s.block), s)
    scaled = x * casts.spread(enc, x.shape, s.block)
    rounded = round_to_code(scaled.clamp(-fmt.qmax, fmt.qmax), fmt, random_bits(keys, x.shape, place)[0])
    qdata.copy_(casts.codes_of(rounded, fmt))
    scale.view(torch.uint8).copy_(new.view(torch.uint8))


def check_packed(spec: str) -> QuantSpec:
    """The spec by which :func:`quantize_at_random` rounds. Raises ValueError for codes of 8 bits."""
    s = spec_of(spec, packed=True)
    if FORMATS[s.format].codes_a_byte == 1:
        raise ValueError(f"quantize_at_random takes codes of several a byte; got {s}: adamw steps codes of 8 bits")
    return replace(s, scale_rounding="pow2")


def write_scales(
    scale: Tensor, amax: Tensor, spec: str, shape: Sequence[int], scale_block: Sequence[int], place: Sequence[int]
) -> None:
    """Write the scales that :func:`adamw` gives elements ``[n, k]`` by ``amax``; see there for the arguments."""
    s = spec_of(spec)
    offset = [0 if b == -1 else at % b for at, b in zip(place, s.block, strict=True)]
    _write_scales(scale, casts.encode(amax, s)[1], shape, s.block, scale_block, offset)


def _write_scales(
    scale: Tensor, new: Tensor, shape: Sequence[int], block: Sequence[int], scale_block: Sequence[int],
    offset: Sequence[int],
) -> None:  # fmt: skip
    for dim in (0, 1):
        # The first element of each scale_block, and the block that it lies in.
        size, stored = block[dim], scale_block[dim]
        starts = torch.arange(0, max(shape[dim], 1), max(shape[dim], 1) if stored == -1 else stored, device=new.device)
        at = torch.zeros_like(starts) if size == -1 else (starts + offset[dim]) // size
        new = new.index_select(dim, at[: scale.shape[dim]])
    if scale.dtype == torch.float32:
        scale.copy_(new)
    else:
        exponents = new.view(torch.int32) >> 23 if new.dtype == torch.float32 else new.view(torch.uint8)
        scale.view(torch.uint8).copy_(exponents)
