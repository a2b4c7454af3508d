"""The parts of a gradient that ranks exchange: rounded to codes at random, and added in pairs of ranks.

A part has codes in groups of 128, then the exponent of the scale of each group. The random words of a group are a hash
of its own bits, so they need no seed that a checkpoint would have to keep, and no second pass over the gradient.
"""

from collections import namedtuple

import triton
import triton.language as tl

from tritonfp8.kernels.numerics import NAN_BITS, block_amax, encode_fp32, magnitude_bits
from tritonfp8.kernels.optim.rounding import CODES, GROUP, hash32, random_words, round_to_code, states_of
from tritonfp8.kernels.pdl import begin

# Elements that share a scale.
COLS: tl.constexpr = tl.constexpr(128)

# Parts of ranks: values or codes, exponents of scales or None, distances of two parts in both.
Parts = namedtuple("Parts", "values_ptr exponents_ptr stride stride_exponents")
# Elements of a tile ``[rows, COLS]`` in a part, and the groups that they lie in, each with its mask.
PartTile = namedtuple("PartTile", "at mask groups groups_mask")


@triton.jit
def _tile(n, groups, ROWS: tl.constexpr):
    """The part of a program, and its :class:`PartTile`."""
    tiles = tl.cdiv(groups, ROWS)
    rows = (tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    at = rows[:, None] * COLS + tl.arange(0, COLS)[None, :]
    return tl.program_id(0) // tiles, PartTile(at, at < n, rows[:, None], (rows < groups)[:, None])


# The first rank would be specialized as a constant, which has no dtype.
@triton.jit(do_not_specialize=["rank"])
def quantize_parts_kernel(
    x_ptr, q_ptr, exponents_ptr, n, groups, stride, rank, QMAX: tl.constexpr, MANTISSA_BITS: tl.constexpr,
    EMIN: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The codes of ``x [parts, n]`` and their exponents; see ``tritonfp8.reference.quantize_parts``.

    Parts of the result lie ``stride`` bytes apart. A program has ROWS groups of one part.
    """
    begin(DEPENDENT)
    part, tile = _tile(n, groups, ROWS)
    x = tl.load(x_ptr + part.to(tl.int64) * n + tile.at, mask=tile.mask, other=0.0).to(tl.float32)
    enc, scale = encode_fp32(block_amax(magnitude_bits(x), 1, COLS), QMAX, True)
    # Integers, so that the sum is the same in every order. Only its last 32 bits count.
    own = tl.sum(x.to(tl.int32, bitcast=True).to(tl.int64), 1)[:, None].to(tl.uint32)
    index = (part.to(tl.int64) * groups + tile.groups).to(tl.uint32)
    place = hash32(hash32(tl.zeros((1, 1), tl.uint32) + rank.to(tl.uint32)) ^ index)
    states = states_of(hash32(own ^ place), tl.arange(0, COLS // GROUP).to(tl.uint32)[None, :], place)
    words = random_words(states, 0, CODES, True, COLS)
    codes = round_to_code(x * enc, words, MANTISSA_BITS, EMIN, QMAX, True, True, True)
    to = part.to(tl.int64) * stride
    tl.store(q_ptr + to + tile.at, codes.to(tl.uint8), mask=tile.groups_mask)
    exponents = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
    tl.store(exponents_ptr + to + tile.groups, exponents, mask=tile.groups_mask)


@triton.jit
def _part(parts, tile, INDEX: tl.constexpr):
    """The values of one part, float32."""
    index = tl.full((), INDEX, tl.int32)
    x = tl.load(parts.values_ptr + index.to(tl.int64) * parts.stride + tile.at, mask=tile.mask, other=0.0).to(
        tl.float32
    )
    if parts.exponents_ptr is not None:
        from_ = parts.exponents_ptr + index.to(tl.int64) * parts.stride_exponents
        exponents = tl.load(from_ + tile.groups, mask=tile.groups_mask, other=127).to(tl.int32)
        x *= tl.where(exponents == 255, NAN_BITS, exponents << 23).to(tl.float32, bitcast=True)
    return x


@triton.constexpr_function
def _before(count):
    """The largest power of two below ``count``."""
    return 1 << ((count - 1).bit_length() - 1)


@triton.jit
def _sum_of(parts, tile, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """The sum of neighbouring parts: neighbours are added, then neighbouring sums; an odd last one waits."""
    if COUNT == 1:
        return _part(parts, tile, FIRST)
    else:
        LEFT: tl.constexpr = _before(COUNT)
        left = _sum_of(parts, tile, FIRST, LEFT)
        return left + _sum_of(parts, tile, FIRST + LEFT, COUNT - LEFT)


@triton.jit
def sum_in_pairs_kernel(
    values_ptr, exponents_ptr, out_ptr, n, groups, stride, stride_exponents, PARTS: tl.constexpr,
    FACTOR: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``out [n]``: the sum of PARTS parts, values or codes with exponents, times FACTOR; ROWS groups a program."""
    begin(DEPENDENT)
    _, tile = _tile(n, groups, ROWS)
    total = _sum_of(Parts(values_ptr, exponents_ptr, stride, stride_exponents), tile, 0, PARTS) * FACTOR
    tl.store(out_ptr + tile.at, total.to(out_ptr.dtype.element_ty), mask=tile.mask)
