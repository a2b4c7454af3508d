"""The figures of operands of one shape in two launches: sums over each strip of columns, then the figures.

In plain torch they take about forty launches, whose host time is most of the cost of a sample on a small model.
"""

import triton
import triton.language as tl

from tritonfp8.kernels.pdl import begin

INFINITY: tl.constexpr = tl.constexpr(float("inf"))
LARGEST: tl.constexpr = tl.constexpr(3.4028234663852886e38)
NO_COLUMN: tl.constexpr = tl.constexpr(2**31 - 1)
DECIBELS: tl.constexpr = tl.constexpr(4.3429448190325182)  # 10 / ln(10)
# Scaling rounds in float32: an amax may come out a little above the format's largest value without being clipped.
ROUNDING: tl.constexpr = tl.constexpr(1 + 2.0**-20)
SUMS: tl.constexpr = tl.constexpr(6)


@triton.jit
def _store_sum(ptr, index, strips, counts):
    total = tl.sum(tl.sum(counts.to(tl.float64), 1), 0)
    tl.store(ptr + index * strips, total)


@triton.jit
def strip_sums_kernel(
    x_ptr, result_ptr, q_ptr, sums_ptr, columns_ptr, R, K, strips,
    LIMIT: tl.constexpr, QUANTIZED: tl.constexpr, CLIPS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Sums over a strip of TILE_N columns of one operand ``x [R, K]``, and the amax of each column.

    ``sums [operands, 6, strips]``, float64: how many elements are zero, not finite, clipped, flushed to zero; the sum
    of squares of the finite elements, and that of their errors. ``columns [operands, K]``, float32. All tensors are
    contiguous; ``result`` (float32) and ``q`` are read if QUANTIZED, ``q`` if scales may clip (CLIPS).
    """
    begin(DEPENDENT)
    pid = tl.program_id(0)
    operand, strip = pid // strips, pid % strips
    base = operand.to(tl.int64) * R * K
    cols = strip * TILE_N + tl.arange(0, TILE_N)[None, :]
    column = tl.zeros((TILE_M, TILE_N), tl.float32)
    zero, lost, clipped, flushed = (
        tl.zeros((TILE_M, TILE_N), tl.int32),
        tl.zeros((TILE_M, TILE_N), tl.int32),
        tl.zeros((TILE_M, TILE_N), tl.int32),
        tl.zeros((TILE_M, TILE_N), tl.int32),
    )
    signal, noise = tl.zeros((TILE_M, TILE_N), tl.float64), tl.zeros((TILE_M, TILE_N), tl.float64)
    for start in range(0, R, TILE_M):
        rows = start + tl.arange(0, TILE_M)[:, None]
        mask = (rows < R) & (cols < K)
        offsets = base + rows.to(tl.int64) * K + cols
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        finite = tl.abs(x) < INFINITY
        values = tl.where(finite, x, 0.0)
        column = tl.maximum(column, tl.abs(values))
        zero += (mask & (x == 0)).to(tl.int32)
        lost += (mask & (finite == 0)).to(tl.int32)
        wide = values.to(tl.float64)
        signal += wide * wide
        if QUANTIZED:
            result = tl.load(result_ptr + offsets, mask=mask, other=0.0)
            flushed += ((result == 0) & (values != 0)).to(tl.int32)
            error = tl.where(finite, result - values, 0.0).to(tl.float64)
            noise += error * error
            if CLIPS:
                q = tl.load(q_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
                clipped += ((tl.abs(q) == LIMIT) & (tl.abs(values) > tl.abs(result) * ROUNDING)).to(tl.int32)
    sums_ptr += operand * SUMS * strips + strip
    _store_sum(sums_ptr, 0, strips, zero)
    _store_sum(sums_ptr, 1, strips, lost)
    _store_sum(sums_ptr, 2, strips, clipped)
    _store_sum(sums_ptr, 3, strips, flushed)
    _store_sum(sums_ptr, 4, strips, signal)
    _store_sum(sums_ptr, 5, strips, noise)
    amaxes = tl.max(column, 0, keep_dims=True)
    tl.store(columns_ptr + operand.to(tl.int64) * K + cols, amaxes, mask=cols < K)


@triton.jit
def _total(ptr, index, strips, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, strips, BLOCK):
        places = start + tl.arange(0, BLOCK)
        total += tl.load(ptr + index * strips + places, mask=places < strips, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _bits(ptr, start, K, BLOCK: tl.constexpr):
    """The columns and their amaxes as integers, which have the order of the magnitudes."""
    cols = start + tl.arange(0, BLOCK)
    return cols, tl.load(ptr + cols, mask=cols < K, other=0.0).to(tl.int32, bitcast=True)


@triton.jit
def _largest_column(ptr, K, BLOCK: tl.constexpr):
    """The largest amax of a column as an integer, the first such column, and how many columns are not zero."""
    best, channel, count = tl.full((), -1, tl.int32), tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for start in range(0, K, BLOCK):
        cols, bits = _bits(ptr, start, K, BLOCK)
        count += tl.sum((bits > 0).to(tl.int32), 0)
        most = tl.max(bits, 0)
        first = tl.min(tl.where(bits == most, cols, NO_COLUMN), 0)
        channel = tl.where(most > best, first, channel)
        best = tl.maximum(best, most)
    return best, channel, count


@triton.jit
def _median_column(ptr, K, best, count, BLOCK: tl.constexpr):
    """The (lower) median of the amaxes that are not zero, as an integer, by bisection."""
    low, high = tl.full((), 0, tl.int32), best
    wanted = (count + 1) // 2
    for _ in range(31):
        middle = low + (high - low) // 2
        below = tl.full((), 0, tl.int32)
        for start in range(0, K, BLOCK):
            _cols, bits = _bits(ptr, start, K, BLOCK)
            below += tl.sum(((bits > 0) & (bits <= middle)).to(tl.int32), 0)
        high = tl.where(below >= wanted, middle, high)
        low = tl.where(below >= wanted, low, tl.minimum(middle + 1, high))
    return high


@triton.jit
def _sqnr(signal, noise):
    ratio = DECIBELS * tl.log(signal / noise)
    ratio = tl.where(ratio == ratio, ratio, -INFINITY)
    return tl.where(noise == 0, INFINITY, ratio)


@triton.jit
def figures_kernel(
    sums_ptr, columns_ptr, whole_ptr, low_ptr, high_ptr, out_ptr, R, K, strips, elements,
    QUANTIZED: tl.constexpr, FIELDS: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``out [operands, FIELDS]``, float64, from the sums of the strips: a program each operand.

    ``whole [operands]``, ``low`` and ``high`` (float32) are the amax of the operand and the range of its scales, which
    are read if QUANTIZED.
    """
    begin(DEPENDENT)
    operand = tl.program_id(0)
    sums_ptr += operand * SUMS * strips
    columns_ptr += operand.to(tl.int64) * K
    # Triton makes an argument of 1 a constant, which has no dtype.
    measured = tl.full((), 1.0, tl.float64) * R * K
    whole = tl.load(whole_ptr + operand).to(tl.float64)
    lost = _total(sums_ptr, 1, strips, BLOCK) / measured
    # A row that was not measured may have the only value that is not finite.
    lost = tl.where(tl.abs(whole) < INFINITY, lost, tl.maximum(lost, 1.0 / (tl.full((), 1.0, tl.float64) * elements)))
    best, channel, count = _largest_column(columns_ptr, K, BLOCK)
    median = _median_column(columns_ptr, K, best, count, BLOCK)
    ratio = tl.div_rn(best.to(tl.float32, bitcast=True), median.to(tl.float32, bitcast=True))
    ratio = tl.where(count > 0, tl.minimum(ratio, LARGEST), 1.0)
    out_ptr += operand * FIELDS
    tl.store(out_ptr, whole)
    tl.store(out_ptr + 3, _total(sums_ptr, 2, strips, BLOCK) / measured)
    tl.store(out_ptr + 4, _total(sums_ptr, 3, strips, BLOCK) / measured)
    tl.store(out_ptr + 5, _total(sums_ptr, 0, strips, BLOCK) / measured)
    tl.store(out_ptr + 6, lost)
    tl.store(out_ptr + 8, ratio.to(tl.float64))
    tl.store(out_ptr + 9, channel.to(tl.float64))
    if QUANTIZED:
        tl.store(out_ptr + 1, tl.load(low_ptr + operand).to(tl.float64))
        tl.store(out_ptr + 2, tl.load(high_ptr + operand).to(tl.float64))
        signal, noise = _total(sums_ptr, 4, strips, BLOCK), _total(sums_ptr, 5, strips, BLOCK)
        tl.store(out_ptr + 7, _sqnr(signal, noise))
    else:
        tl.store(out_ptr + 1, tl.full((), float("nan"), tl.float64))
        tl.store(out_ptr + 2, tl.full((), float("nan"), tl.float64))
        tl.store(out_ptr + 7, tl.full((), INFINITY, tl.float64))
