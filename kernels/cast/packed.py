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
from tritonfp8.kernels.optim.rounding import CODES, random_states, random_words, round_to_code
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
def packed_at_random(x, words, QMAX: tl.constexpr, MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr):
    """As :func:`packed_codes`, up or down by random words, uint32 ``[m, blocks, n]``."""
    codes = round_to_code(x, words, MANTISSA_BITS, EMIN, QMAX, True, True, False).to(tl.int32)
    # A sign before seven bits; where these are ones, NaN.
    codes = tl.where((codes & 0x7F) == 0x7F, 0, (codes & 7) | ((codes >> 4) & 8))
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
def quantize_packed_at_random_kernel(
    x_ptr, q_ptr, s_ptr, keys_ptr, M, K, above, left, stride_qm, stride_qk, stride_sm, stride_sk,
    ROWS: tl.constexpr, COLS: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, E8M0: tl.constexpr, POW2: tl.constexpr,
    ALIGNED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """As :func:`quantize_packed_kernel`, of a contiguous ``x``, each code rounded up or down at random.

    ``above`` and ``left`` are row and column of the first element in the whole weight. ALIGNED: ``left`` is a multiple
    of the columns that share a random state.
    """
    tl.static_assert(ROWS == 1 and E8M0)
    begin(DEPENDENT)
    pid_m, pid_n = tile_index(tl.program_id(0), M, K, TILE_M, TILE_N, 1)
    rows, blocks = _rows(pid_m, TILE_M), _blocks(pid_n, COLS, TILE_N)
    cols = _elements(blocks, COLS)
    x = tl.load(
        x_ptr + rows.to(tl.int64)[:, :, None] * K + cols.to(tl.int64), mask=(rows < M)[:, :, None] & (cols < K),
        other=0.0,
    )  # fmt: skip
    found = amax_bits(reduce_max(magnitudes(x), 2), x.dtype)
    enc, scale = encode_e8m0(found, EMAX, QMAX_MANTISSA, POW2)
    first = left + pid_n * TILE_N
    states = random_states(keys_ptr, above + pid_m * TILE_M, first, ALIGNED, TILE_M, TILE_N)
    words = tl.reshape(random_words(states, first, CODES, ALIGNED, TILE_N), (TILE_M, TILE_N // COLS, COLS))
    q = packed_at_random(x.to(tl.float32) * enc[:, :, None], words, QMAX, MANTISSA_BITS, EMIN)
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
def _largest(
    q_rows, s_rows, is_row, K, stride_qk, stride_sk,
    COLS: tl.constexpr, MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Bits of the largest magnitude of each row, int32 ``[TILE_M]``."""
    largest = tl.zeros((is_row.shape[0],), tl.int32)
    for pid_n in range(tl.cdiv(K, TILE_N)):
        blocks = _blocks(pid_n, COLS, TILE_N)
        values = _load_scaled(q_rows, s_rows, is_row, blocks, K, stride_qk, stride_sk, COLS, MANTISSA_BITS, EMIN)
        largest = tl.maximum(largest, tl.max(tl.max(magnitude_bits(values), 2), 1))
    return largest


@triton.jit
def measure_rows_kernel(
    q_ptr, s_ptr, scale_ptr, rounded_ptr, M, K, stride_qm, stride_qk, stride_sm, stride_sk,
    COLS: tl.constexpr, MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr,
    OUT_QMAX: tl.constexpr, OUT_MANTISSA_BITS: tl.constexpr, OUT_EMIN: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The scale of each row by which ``expand_codes_kernel`` expands it, and how many of its values that rounds.

    A program takes TILE_M rows and reads them twice, the second time from cache.
    """
    begin(DEPENDENT)
    rows = _rows(tl.program_id(0), TILE_M)
    q_rows, s_rows = q_ptr + rows.to(tl.int64) * stride_qm, s_ptr + rows.to(tl.int64) * stride_sm
    largest = _largest(q_rows, s_rows, rows < M, K, stride_qk, stride_sk, COLS, MANTISSA_BITS, EMIN, TILE_N)
    enc, scale = encode_fp32(largest, OUT_QMAX, True)
    rounded = tl.zeros((TILE_M,), tl.int32)
    for pid_n in range(tl.cdiv(K, TILE_N)):
        blocks = _blocks(pid_n, COLS, TILE_N)
        values = _load_scaled(q_rows, s_rows, rows < M, blocks, K, stride_qk, stride_sk, COLS, MANTISSA_BITS, EMIN)
        # Of numbers of so few digits these are in the format that are multiples of its smallest one.
        multiples = values * enc[:, None, None] * (2.0 ** (OUT_MANTISSA_BITS - OUT_EMIN))
        rounded += tl.sum(tl.sum((multiples != tl.floor(multiples)).to(tl.int32), 2), 1)
    tl.store(scale_ptr + rows, scale[:, None], mask=rows < M)
    # In a row with a NaN nothing is a number.
    tl.store(rounded_ptr + rows, tl.where(largest < INFINITY_BITS, rounded, 0)[:, None], mask=rows < M)


@triton.jit
def _or(x, y):
    return x | y


@triton.jit
def _load_words(q_rows, s_rows, is_row, blocks, K, stride_sk, COLS: tl.constexpr):
    """Codes of a tile, eight a word, int32 ``[m, blocks, 4]``, and biased exponents of its blocks, int32."""
    each = tl.arange(0, COLS // 8)[None, None, :]
    mask = is_row & (blocks < K // COLS)
    words = tl.load(q_rows[:, :, None] + blocks[:, :, None] * (COLS // 8) + each, mask=mask[:, :, None], other=0)
    exponents = tl.load(s_rows + blocks.to(tl.int64) * stride_sk, mask=mask, other=0)
    return words, exponents.to(tl.int32)


@triton.jit
def _largest_of_words(words, exponents):
    """Bits of a float32 in the binade of the largest magnitude of each row, int32 ``[m]``; of infinity beyond float32.

    Mantissas of codes are 1 and 1.5: the scale of a row depends only on the binade.
    """
    # In each four bits: 8 of a magnitude from 4 on, 4 from 2 on, 2 from 1 on, 1 of 0.5.
    found = (words & 0x77777777) | ((words & (words << 1) & 0x44444444) << 1)
    found = tl.reduce(found, 2, _or)
    found |= found >> 16
    found |= found >> 8
    found = (found | (found >> 4)) & 15
    binade = exponents + tl.where(found >= 8, 2, tl.where(found >= 4, 1, tl.where(found >= 2, 0, -1)))
    bits = tl.where(binade > 0, tl.minimum(binade, 255) << 23, 1)
    bits = tl.where(exponents == 255, INFINITY_BITS, tl.where(found == 0, 0, bits))
    return tl.max(bits, 1)


@triton.jit
def _bytes_of_four(codes):
    """Four codes, in the low 16 bits -> a byte each."""
    codes = (codes | (codes << 8)) & 0x00FF00FF
    return (codes | (codes << 4)) & 0x0F0F0F0F


@triton.jit
def _four_exact(codes, below):
    """Four codes, in the low 16 bits, to four bytes of e4m3; ``below`` is their exponent less the row's, from -5.

    A magnitude of two bits of exponent and one of mantissa becomes bits 2 to 4 of e4m3, to which the difference of
    exponents is added. Two differ: 0, to which nothing is added, and 0.5, which is no normal number of e2m1.
    """
    codes = _bytes_of_four(codes)
    magnitude = codes & 0x07070707
    is_some = ((magnitude + 0x7F7F7F7F) >> 7) & 0x01010101
    is_normal = (magnitude + 0x7E7E7E7E) >> 7
    value = ((magnitude & (is_normal | 0x06060606)) << 2) + is_some * (0x30 + 8 * below)
    return value | ((codes << 4) & -0x7F7F7F80)


@triton.jit
def _four_rounded(codes, below):
    """:func:`_four_exact` of any ``below``: numbers too small to be normal in e4m3 are rounded to nearest even."""
    codes = _bytes_of_four(codes)
    magnitude = codes & 0x07070707
    # In steps of 2^-9, the smallest e4m3, 0.5 of the block is this.
    half = ((tl.minimum(tl.maximum(below, -20), 0) + (127 + 8)) << 23).to(tl.float32, bitcast=True)
    value = magnitude * 0
    for i in tl.static_range(1, 8):
        # Sums with 1.5 * 2^23 are rounded to whole numbers, which are their low bits.
        steps = (half * (i if i < 2 else (2 + i % 2) << (i // 2 - 1)) + 12582912.0).to(tl.int32, bitcast=True) & 255
        normal = (0x30 + 8 * below) + (0 if i == 1 else 4 * i)
        differs = (((magnitude ^ (i * 0x01010101)) + 0x7F7F7F7F) >> 7) & 0x01010101
        value += (differs ^ 0x01010101) * tl.where(normal >= 8, normal, steps)
    return value | ((codes << 4) & -0x7F7F7F80)


@triton.jit
def _store_words(
    out_rows, words, exponents, of_rows, is_row, blocks, K, COLS: tl.constexpr, ROUNDS: tl.constexpr
):  # fmt: skip
    """Expand the codes of a tile, eight a word, and store them."""
    below = (exponents - of_rows)[:, :, None]
    low, high = words & 0xFFFF, (words >> 16) & 0xFFFF
    if ROUNDS:
        is_nan = (of_rows == 255)[:, :, None]
        low = tl.where(is_nan, 0x7F7F7F7F, _four_rounded(low, below))
        high = tl.where(is_nan, 0x7F7F7F7F, _four_rounded(high, below))
    else:
        low, high = _four_exact(low, below), _four_exact(high, below)
    pairs = tl.reshape(tl.join(low, high), (words.shape[0], words.shape[1], 2 * words.shape[2]))
    each = tl.arange(0, COLS // 4)[None, None, :]
    mask = is_row & (blocks < K // COLS)
    tl.store(out_rows[:, :, None] + blocks[:, :, None] * (COLS // 4) + each, pairs, mask=mask[:, :, None])


@triton.jit
def _largest_by_words(q_words, s_rows, is_row, K, stride_sk, COLS: tl.constexpr, TILE_N: tl.constexpr):
    """:func:`_largest_of_words` of whole rows."""
    largest = tl.zeros((is_row.shape[0],), tl.int32)
    for pid_n in range(tl.cdiv(K, TILE_N)):
        words, exponents = _load_words(q_words, s_rows, is_row, _blocks(pid_n, COLS, TILE_N), K, stride_sk, COLS)
        largest = tl.maximum(largest, _largest_of_words(words, exponents))
    return largest


@triton.jit
def scale_rows_kernel(
    q_ptr, s_ptr, scale_ptr, M, K, stride_qm, stride_sm, stride_sk,
    COLS: tl.constexpr, OUT_QMAX: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The scales that ``expand_codes_kernel`` gives rows, of aligned rows of whole blocks."""
    begin(DEPENDENT)
    rows = _rows(tl.program_id(0), TILE_M)
    q_words = q_ptr.to(tl.pointer_type(tl.int32)) + tl.multiple_of(rows.to(tl.int64) * (stride_qm // 4), (4, 4))
    s_rows = s_ptr + rows.to(tl.int64) * stride_sm
    largest = _largest_by_words(q_words, s_rows, rows < M, K, stride_sk, COLS, TILE_N)
    _, scale = encode_fp32(largest, OUT_QMAX, True)
    tl.store(scale_ptr + rows, scale[:, None], mask=rows < M)


@triton.jit
def _expand_words(
    out_ptr, q_words, s_rows, scale, rows, M, K, stride_sk, COLS: tl.constexpr, TILE_N: tl.constexpr
):  # fmt: skip
    """Expand whole rows, eight codes at a time."""
    out_rows = out_ptr.to(tl.pointer_type(tl.int32)) + tl.multiple_of(rows.to(tl.int64) * (K // 4), (8, 8))
    of_rows = (scale.to(tl.int32, bitcast=True) >> 23)[:, None]
    is_nan = of_rows == 255
    is_row = rows < M
    for pid_n in range(tl.cdiv(K, TILE_N)):
        blocks = _blocks(pid_n, COLS, TILE_N)
        words, exponents = _load_words(q_words, s_rows, is_row, blocks, K, stride_sk, COLS)
        is_exact = ~is_nan & (exponents - of_rows >= -5)
        if tl.min(tl.where(is_row & (blocks < K // COLS), is_exact.to(tl.int32), 1)) == 1:
            _store_words(out_rows, words, exponents, of_rows, is_row, blocks, K, COLS, False)
        else:
            _store_words(out_rows, words, exponents, of_rows, is_row, blocks, K, COLS, True)


@triton.jit
def _known(known_ptr, rows, is_row):
    """The scales of these rows, float32 ``[m]``."""
    return tl.reshape(tl.load(known_ptr + rows, mask=is_row, other=1.0), (rows.shape[0],))


@triton.jit
def expand_codes_kernel(
    q_ptr, s_ptr, known_ptr, ends_ptr, out_ptr, scale_ptr, M, K, stride_qm, stride_qk, stride_sm, stride_sk, group_rows,
    COLS: tl.constexpr, MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr,
    OUT_QMAX: tl.constexpr, OUT_MANTISSA_BITS: tl.constexpr, OUT_EMIN: tl.constexpr, DIRECT_CAST: tl.constexpr,
    WORDS: tl.constexpr, KNOWN: tl.constexpr, GROUPED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Codes with a scale a block -> 8-bit codes with a scale a row, a power of two.

    A program takes TILE_M rows. KNOWN: their scales lie at ``known_ptr``, contiguous; else it reads the rows twice, the
    second time from cache. WORDS: eight codes are read, and four written, as one integer; all blocks are whole and rows
    are aligned. GROUPED: ``group_rows`` rows, a multiple of TILE_M, are of one group, and are left out if its end, at
    ``ends_ptr``, is the end of the group before.
    """
    begin(DEPENDENT)
    if GROUPED:
        group = tl.program_id(0) * TILE_M // group_rows
        if tl.load(ends_ptr + group) == tl.load(ends_ptr + group - 1, mask=group > 0, other=0):
            return
    rows = _rows(tl.program_id(0), TILE_M)
    is_row = rows < M
    q_rows, s_rows = q_ptr + rows.to(tl.int64) * stride_qm, s_ptr + rows.to(tl.int64) * stride_sm
    if WORDS:
        tl.static_assert(MANTISSA_BITS == 1 and EMIN == 0 and OUT_MANTISSA_BITS == 3 and OUT_EMIN == -6)
        firsts = tl.multiple_of(rows.to(tl.int64) * (stride_qm // 4), (4, 4))
        q_words = q_ptr.to(tl.pointer_type(tl.int32)) + firsts
        if KNOWN:
            scale = _known(known_ptr, rows, is_row)
        else:
            largest = _largest_by_words(q_words, s_rows, is_row, K, stride_sk, COLS, TILE_N)
            _, scale = encode_fp32(largest, OUT_QMAX, True)
        _expand_words(out_ptr, q_words, s_rows, scale, rows, M, K, stride_sk, COLS, TILE_N)
    else:
        if KNOWN:
            scale = _known(known_ptr, rows, is_row)
            enc = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        else:
            largest = _largest(q_rows, s_rows, is_row, K, stride_qk, stride_sk, COLS, MANTISSA_BITS, EMIN, TILE_N)
            enc, scale = encode_fp32(largest, OUT_QMAX, True)
        for pid_n in range(tl.cdiv(K, TILE_N)):
            blocks = _blocks(pid_n, COLS, TILE_N)
            values = _load_scaled(q_rows, s_rows, is_row, blocks, K, stride_qk, stride_sk, COLS, MANTISSA_BITS, EMIN)
            scaled = values * enc[:, None, None]
            nearest = scaled if DIRECT_CAST else round_to_format(scaled, OUT_MANTISSA_BITS, OUT_EMIN)
            _store(out_ptr, nearest.to(out_ptr.dtype.element_ty), rows, blocks, M, K, COLS)
    tl.store(scale_ptr + rows, scale[:, None], mask=is_row)
