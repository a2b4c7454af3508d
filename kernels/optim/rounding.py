"""Random words of the optimizer step, and rounding by them: what ``reference.optimizer`` defines, in integers."""

import triton
import triton.language as tl

from tritonfp8.kernels.numerics import MAGNITUDE_MASK

RANDOM_BITS: tl.constexpr = tl.constexpr(20)
FIRST: tl.constexpr = tl.constexpr(0x7FEB352D)
SECOND: tl.constexpr = tl.constexpr(0x846CA68B)
THIRD: tl.constexpr = tl.constexpr(0x9E3779B1)
# So many columns share a state. A thread has them side by side, so it computes one state for them.
GROUP: tl.constexpr = tl.constexpr(8)
GENERATOR: tl.constexpr = tl.constexpr(0xAC564B05)
GENERATOR_2: tl.constexpr = tl.constexpr(GENERATOR.value**2 % 2**32)
GENERATOR_4: tl.constexpr = tl.constexpr(GENERATOR.value**4 % 2**32)
# Of the first words that round codes and the two moments.
CODES: tl.constexpr = tl.constexpr(GENERATOR.value)
MEANS: tl.constexpr = tl.constexpr(GENERATOR.value ** (1 + GROUP.value) % 2**32)
SQUARES: tl.constexpr = tl.constexpr(GENERATOR.value ** (1 + 2 * GROUP.value) % 2**32)
QUIET_NAN: tl.constexpr = tl.constexpr(0x7FC00000)


@triton.jit
def hash32(x):
    """``reference.optimizer.hash32``."""
    x = (x ^ (x >> 16)) * tl.full((), FIRST, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), SECOND, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _columns(col, ALIGNED: tl.constexpr, TILE_N: tl.constexpr):
    """Columns of a tile; if ALIGNED only the last three bits are right."""
    # Without ``col`` they are known at compile time.
    return tl.arange(0, TILE_N) if ALIGNED else col + tl.arange(0, TILE_N)


@triton.jit
def random_states(keys_ptr, row, col, ALIGNED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """``reference.optimizer.random_states`` of a tile whose first element has this place in the whole weight.

    ALIGNED: a group begins there, and the result has one state for each, else one for each element.
    """
    first = tl.load(keys_ptr).to(tl.uint32, bitcast=True)
    second = tl.load(keys_ptr + 1).to(tl.uint32, bitcast=True)
    groups = col // GROUP + tl.arange(0, TILE_N // GROUP) if ALIGNED else _columns(col, False, TILE_N) // GROUP
    rows = hash32((row + tl.arange(0, TILE_M)).to(tl.uint32) ^ first)[:, None]
    return states_of(rows, groups[None, :], second)


@triton.jit
def states_of(rows, groups, second):
    """The state of each group of columns: hashes of rows and ``second`` are random words, groups are counted."""
    x = rows + groups.to(tl.uint32) * tl.full((), THIRD, tl.uint32)
    x = (x ^ (x >> 16)) * tl.full((), FIRST, tl.uint32) + (rows * tl.full((), SECOND, tl.uint32) + second)
    return x ^ (x >> 15)


@triton.jit
def random_words(states, col, START: tl.constexpr, ALIGNED: tl.constexpr, TILE_N: tl.constexpr):
    """The words of the elements of a tile that round CODES, MEANS or SQUARES; the first bits are the random ones."""
    if ALIGNED:
        states = per_group(states)
    at = _columns(col, ALIGNED, TILE_N)[None, :]
    by = tl.where(at & 1 != 0, tl.full((), GENERATOR, tl.uint32), 1) * tl.full((), START, tl.uint32)
    by = by * tl.where(at & 2 != 0, tl.full((), GENERATOR_2, tl.uint32), 1)
    return states * (by * tl.where(at & 4 != 0, tl.full((), GENERATOR_4, tl.uint32), 1))


@triton.jit
def per_group(x):
    """Each element of ``x [M, N]`` for a group of columns: ``[M, N * GROUP]``."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x[:, :, None], (M, N, GROUP)), (M, N * GROUP))


@triton.jit
def round_to_code(
    x, word, MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, QMAX: tl.constexpr, STOCHASTIC: tl.constexpr,
    SIGNED: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """``reference.optimizer.round_to_code``, as codes in integers.

    SIGNED: else no number is negative. BOUNDED: no magnitude is above QMAX.
    """
    LOST: tl.constexpr = 23 - MANTISSA_BITS
    # The value of code 0x7F, if it were a number: a minimum with NaN is the other operand, so NaN becomes this code.
    LAST: tl.constexpr = 2.0 ** (EMIN + 2 ** (7 - MANTISSA_BITS) - 2) * (2 - 2.0**-MANTISSA_BITS)
    # Then a number is subnormal in float32 where its code is, and the bits before the lost ones are the code.
    LOWER: tl.constexpr = 2.0 ** (-126 - EMIN)
    if not BOUNDED:
        x = tl.clamp(x, -QMAX, QMAX, propagate_nan=tl.PropagateNan.ALL)
    pattern = (tl.minimum(x, LAST) * LOWER).to(tl.int32, bitcast=True)
    if STOCHASTIC:
        pattern += ((word >> (32 - RANDOM_BITS)) << (LOST - RANDOM_BITS)).to(tl.int32)
    else:
        pattern += 2 ** (LOST - 1)
    if SIGNED:
        # The code to the bits after the sign, and both to the last byte.
        code = (pattern << (24 - LOST)) & MAGNITUDE_MASK | pattern & ~MAGNITUDE_MASK
        return code.to(tl.uint32, bitcast=True) >> 24
    else:
        return pattern >> LOST


@triton.jit
def round_to_bfloat16(x, word, STOCHASTIC: tl.constexpr):
    """``reference.optimizer.round_to_bfloat16``."""
    # An addition to the largest pattern of a NaN would make it a negative number.
    pattern = tl.minimum(x.to(tl.int32, bitcast=True), QUIET_NAN)
    if STOCHASTIC:
        pattern += (word >> 16).to(tl.int32)
    else:
        pattern += 0x8000
    return (pattern >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
