"""Producers fused with quantization: RMSNorm, SiLU-mul (SwiGLU), and the backward of SiLU-mul.

A producer computes in float32, rounds to the dtype of its input, and quantizes that value without storing it. Results
are ``[O, M, N]``: O = 2 (gate, up) for the backward of SiLU-mul, otherwise O = 1.

Tiles have four dims, ``[G, T, H, C]``: G blocks of rows for the transposed result, H blocks of columns for the
untransposed one. Reducing T or C gives a block's amax, and its factor broadcasts back. A reshape would move the tile
through shared memory instead. A tile is four tensors, each with every fourth row, so that a thread has the same columns
of four consecutive rows. It stores four 8-bit elements of a transposed row as one 32-bit word.

No operation on an element can be contracted to an FMA, so every kernel computes the same bits.
"""

import triton
import triton.language as tl

from tritonfp8.kernels.numerics import (
    INFINITY_BITS,
    MANTISSA_MASK,
    encode_e8m0,
    encode_fp32,
    logistic,
    magnitude_bits,
    magnitudes,
    reduce_max,
    round_to_format,
    saturate,
)
from tritonfp8.kernels.pdl import begin


@triton.jit
def tile_rows(first, G: tl.constexpr, T: tl.constexpr, STEP: tl.constexpr):
    """Row indices ``[G, T, 1, 1]``: every ``STEP``-th row of G blocks of ``T * STEP`` rows."""
    blocks = tl.arange(0, G)[:, None, None, None] * (T * STEP)
    return first + blocks + tl.arange(0, T)[None, :, None, None] * STEP


@triton.jit
def tile_cols(first, H: tl.constexpr, C: tl.constexpr):
    """Column indices ``[1, 1, H, C]``."""
    return first + tl.arange(0, H)[None, None, :, None] * C + tl.arange(0, C)[None, None, None, :]


@triton.jit
def offsets(rows, cols, stride_m, stride_n):
    """int64 offsets of all pairs of a row and a column."""
    return rows.to(tl.int64) * stride_m + cols.to(tl.int64) * stride_n


@triton.jit
def normalized_rows(x, rstd, ROUND_NORMALIZED: tl.constexpr):
    """``x * rstd`` in float32, with ROUND_NORMALIZED rounded to the dtype of x before the weight is multiplied."""
    normalized = x.to(tl.float32) * rstd
    return normalized.to(x.dtype).to(tl.float32) if ROUND_NORMALIZED else normalized


@triton.jit
def _load(
    a_ptr, b_ptr, c_ptr, rows, cols, M, N, stride_am, stride_an, stride_bm, stride_bn, stride_cm, stride_cn,
    PRODUCER: tl.constexpr,
):  # fmt: skip
    """Load the three inputs of a producer at these rows and columns.

    rms_norm: x, rstd ``[M]``, weight ``[N]``. silu_mul: gate, up, and up again. silu_mul_backward: gate, up, grad.
    """
    mask = (rows < M) & (cols < N)
    a = tl.load(a_ptr + offsets(rows, cols, stride_am, stride_an), mask=mask, other=0.0)
    if PRODUCER == "rms_norm":
        b = tl.load(b_ptr + rows, mask=rows < M, other=0.0)
        c = tl.load(c_ptr + cols * stride_cn, mask=cols < N, other=0.0)
    else:
        b = tl.load(b_ptr + offsets(rows, cols, stride_bm, stride_bn), mask=mask, other=0.0)
        if PRODUCER == "silu_mul":
            c = b
        else:
            c = tl.load(c_ptr + offsets(rows, cols, stride_cm, stride_cn), mask=mask, other=0.0)
    return a, b, c


@triton.jit
def _load_four(
    a_ptr, b_ptr, c_ptr, rows, cols, M, N, stride_am, stride_an, stride_bm, stride_bn, stride_cm, stride_cn,
    PRODUCER: tl.constexpr,
):  # fmt: skip
    """Load the inputs of these rows, and of the rows one, two and three below."""
    x0 = _load(
        a_ptr, b_ptr, c_ptr, rows, cols, M, N, stride_am, stride_an, stride_bm, stride_bn, stride_cm, stride_cn,
        PRODUCER,
    )  # fmt: skip
    x1 = _load(
        a_ptr, b_ptr, c_ptr, rows + 1, cols, M, N, stride_am, stride_an, stride_bm, stride_bn, stride_cm, stride_cn,
        PRODUCER,
    )  # fmt: skip
    x2 = _load(
        a_ptr, b_ptr, c_ptr, rows + 2, cols, M, N, stride_am, stride_an, stride_bm, stride_bn, stride_cm, stride_cn,
        PRODUCER,
    )  # fmt: skip
    x3 = _load(
        a_ptr, b_ptr, c_ptr, rows + 3, cols, M, N, stride_am, stride_an, stride_bm, stride_bn, stride_cm, stride_cn,
        PRODUCER,
    )  # fmt: skip
    return x0, x1, x2, x3


@triton.jit
def _value(inputs, DTYPE: tl.constexpr, PRODUCER: tl.constexpr, ROUND_NORMALIZED: tl.constexpr, RESULT: tl.constexpr):
    """Result number RESULT of a producer from the inputs of :func:`_load`, rounded to ``DTYPE``."""
    a, b, c = inputs
    if PRODUCER == "rms_norm":
        y = normalized_rows(a, b, ROUND_NORMALIZED) * c.to(tl.float32)
    else:
        gate = a.to(tl.float32)
        up = b.to(tl.float32)
        sigmoid = logistic(gate)
        if PRODUCER == "silu_mul":
            y = gate * sigmoid * up
        else:
            grad = c.to(tl.float32)
            slope = sigmoid * tl.fma(gate, 1.0 - sigmoid, 1.0)
            y = grad * up * slope if RESULT == 0 else grad * (gate * sigmoid)
    return y.to(DTYPE)


@triton.jit
def _encode(
    bits, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr, E8M0: tl.constexpr, POW2: tl.constexpr
):
    """amax bits -> encode factor, scale."""
    if E8M0:
        enc, scale = encode_e8m0(bits, EMAX, QMAX_MANTISSA, POW2)
    elif POW2:
        # encode_fp32 without its divisions, which each thread would repeat for each of its columns. The exponent of a
        # correctly rounded QMAX / amax equals that of the exact quotient, limited to 126.
        exponent = EMAX - (bits >> 23) - ((bits & MANTISSA_MASK) > QMAX_MANTISSA).to(tl.int32)
        exponent = tl.where(bits == 0, 0, tl.minimum(exponent + 127, 126))
        finite = bits < INFINITY_BITS
        enc = tl.where(finite, ((127 + exponent) << 23).to(tl.float32, bitcast=True), float("nan"))
        scale = tl.where(finite, ((127 - exponent) << 23).to(tl.float32, bitcast=True), float("nan"))
    else:
        enc, scale = encode_fp32(bits, QMAX, POW2)
    return enc, scale


@triton.jit
def _cast(
    y, enc, FORMAT: tl.constexpr, QMAX: tl.constexpr, MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr,
    MAY_SATURATE: tl.constexpr, DIRECT_CAST: tl.constexpr,
):  # fmt: skip
    scaled = y.to(tl.float32) * enc
    # Scaled by its block's amax an element exceeds QMAX only by float32 rounding, which the cast removes. Only e8m0
    # scales that are rounded down need saturation.
    if MAY_SATURATE:
        scaled = saturate(scaled, QMAX)
    if not DIRECT_CAST:
        scaled = round_to_format(scaled, MANTISSA_BITS, EMIN)
    return scaled.to(FORMAT)


@triton.jit
def _maximum_of_all(bits):
    bits = tl.max(tl.max(bits, 3, keep_dims=True), 2, keep_dims=True)
    return tl.max(tl.max(bits, 1, keep_dims=True), 0, keep_dims=True)


@triton.jit
def _tile_encode(
    bits, amax_ptr, s_ptr, group_m, group_n, groups_m, groups_n, stride_sm, stride_sn, writes,
    QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr, E8M0: tl.constexpr, POW2: tl.constexpr,
    GIVEN_AMAX: tl.constexpr,
):  # fmt: skip
    """Encode factors of blocks from their amax ``bits``, or from ``amax_ptr``; scales are stored where ``writes``."""
    mask = (group_m < groups_m) & (group_n < groups_n)
    if GIVEN_AMAX:
        bits = tl.load(amax_ptr + offsets(group_m, group_n, groups_n, 1), mask=mask, other=0)
    enc, scale = _encode(bits, QMAX, EMAX, QMAX_MANTISSA, E8M0, POW2)
    tl.store(s_ptr + offsets(group_m, group_n, stride_sm, stride_sn), scale, mask=mask & writes)
    return enc


@triton.jit
def _block_encode(
    bits, pid_m, pid_n, amax_ptr, s_ptr, M, N, stride_sm, stride_sn,
    ROWS: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr, E8M0: tl.constexpr,
    POW2: tl.constexpr,
):  # fmt: skip
    """Encode factor of a tile: one block with amax ``bits``, or, if ROWS is -1, a part of the tensor's only block."""
    zero = tl.zeros((1, 1, 1, 1), tl.int32)
    if ROWS == -1:
        enc = _tile_encode(
            zero, amax_ptr, s_ptr, zero, zero, 1, 1, stride_sm, stride_sn, (pid_m == 0) & (pid_n == 0),
            QMAX, EMAX, QMAX_MANTISSA, E8M0, POW2, True,
        )  # fmt: skip
    else:
        enc = _tile_encode(
            bits, amax_ptr, s_ptr, zero + pid_m, zero + pid_n, tl.cdiv(M, ROWS), tl.cdiv(N, ROWS),
            stride_sm, stride_sn, True, QMAX, EMAX, QMAX_MANTISSA, E8M0, POW2, False,
        )  # fmt: skip
    return enc


@triton.jit
def quantize_rows(
    y, enc, rows, cols, pid_n, q_ptr, s_ptr, amax_ptr, M, N, stride_sm, stride_sn,
    ROWS: tl.constexpr, COLS: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, E8M0: tl.constexpr, POW2: tl.constexpr,
    GIVEN_AMAX: tl.constexpr, DIRECT_CAST: tl.constexpr,
):  # fmt: skip
    """Quantize rows ``[G, T, H, C]`` by ``enc``. If ROWS is 1, use the amax of each row's blocks of C instead."""
    H: tl.constexpr = y.shape[2]
    if ROWS == 1:
        bits = tl.max(magnitude_bits(y.to(tl.float32)), 3, keep_dims=True)
        group_n = tl.arange(0, H)[None, None, :, None] + (0 if COLS == -1 else pid_n * H)
        enc = _tile_encode(
            bits, amax_ptr, s_ptr, rows, group_n, M, 1 if COLS == -1 else tl.cdiv(N, COLS), stride_sm, stride_sn,
            COLS != -1 or pid_n == 0, QMAX, EMAX, QMAX_MANTISSA, E8M0, POW2, GIVEN_AMAX,
        )  # fmt: skip
    q = _cast(y, enc, q_ptr.dtype.element_ty, QMAX, MANTISSA_BITS, EMIN, E8M0 and not POW2, DIRECT_CAST)
    tl.store(q_ptr + offsets(rows, cols, N, 1), q, mask=(rows < M) & (cols < N))


@triton.jit
def _maximum_of_four(y0, y1, y2, y3):
    first = tl.maximum(magnitude_bits(y0.to(tl.float32)), magnitude_bits(y1.to(tl.float32)))
    return tl.maximum(first, tl.maximum(magnitude_bits(y2.to(tl.float32)), magnitude_bits(y3.to(tl.float32))))


@triton.jit
def _code(
    y, enc, FORMAT: tl.constexpr, QMAX: tl.constexpr, MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr,
    MAY_SATURATE: tl.constexpr, DIRECT_CAST: tl.constexpr,
):  # fmt: skip
    return _cast(y, enc, FORMAT, QMAX, MANTISSA_BITS, EMIN, MAY_SATURATE, DIRECT_CAST).to(tl.uint8, bitcast=True)


@triton.jit
def _keep(y, y_ptr, rows, cols, M, N):
    tl.store(y_ptr + offsets(rows, cols, N, 1), y.to(y_ptr.dtype.element_ty), mask=(rows < M) & (cols < N))


@triton.jit
def _quantize_normal(
    y0, y1, y2, y3, bits, rows, cols, pid_m, pid_n, q_ptr, s_ptr, amax_ptr, M, N, stride_sm, stride_sn,
    ROWS: tl.constexpr, COLS: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, E8M0: tl.constexpr, POW2: tl.constexpr, DIRECT_CAST: tl.constexpr,
):  # fmt: skip
    """Quantize a tile untransposed. Its row ``4 i + r`` is row i of ``y<r>``; ``rows`` are the rows of ``y0``.

    ``bits`` is the amax of the tile if the tile is one block.
    """
    if ROWS == 1:
        enc = tl.zeros((1, 1, 1, 1), tl.float32)
    else:
        enc = _block_encode(
            bits, pid_m, pid_n, amax_ptr, s_ptr, M, N, stride_sm, stride_sn,
            ROWS, QMAX, EMAX, QMAX_MANTISSA, E8M0, POW2,
        )  # fmt: skip
    quantize_rows(
        y0, enc, rows, cols, pid_n, q_ptr, s_ptr, amax_ptr, M, N, stride_sm, stride_sn, ROWS, COLS,
        QMAX, EMAX, QMAX_MANTISSA, MANTISSA_BITS, EMIN, E8M0, POW2, COLS == -1, DIRECT_CAST,
    )  # fmt: skip
    quantize_rows(
        y1, enc, rows + 1, cols, pid_n, q_ptr, s_ptr, amax_ptr, M, N, stride_sm, stride_sn, ROWS, COLS,
        QMAX, EMAX, QMAX_MANTISSA, MANTISSA_BITS, EMIN, E8M0, POW2, COLS == -1, DIRECT_CAST,
    )  # fmt: skip
    quantize_rows(
        y2, enc, rows + 2, cols, pid_n, q_ptr, s_ptr, amax_ptr, M, N, stride_sm, stride_sn, ROWS, COLS,
        QMAX, EMAX, QMAX_MANTISSA, MANTISSA_BITS, EMIN, E8M0, POW2, COLS == -1, DIRECT_CAST,
    )  # fmt: skip
    quantize_rows(
        y3, enc, rows + 3, cols, pid_n, q_ptr, s_ptr, amax_ptr, M, N, stride_sm, stride_sn, ROWS, COLS,
        QMAX, EMAX, QMAX_MANTISSA, MANTISSA_BITS, EMIN, E8M0, POW2, COLS == -1, DIRECT_CAST,
    )  # fmt: skip


@triton.jit
def _quantize_transposed(
    y0, y1, y2, y3, bits, rows, cols, pid_m, pid_n, qt_ptr, st_ptr, amax_t_ptr, M, N, words, stride_tm, stride_tn,
    ROWS: tl.constexpr, COLS: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, E8M0: tl.constexpr, POW2: tl.constexpr,
    PACKED: tl.constexpr, DIRECT_CAST: tl.constexpr,
):  # fmt: skip
    """Quantize a tile transposed, as :func:`_quantize_normal`; ``bits`` may be the maxima of each four rows."""
    G: tl.constexpr = y0.shape[0]
    WORDS: tl.constexpr = G * y0.shape[1]
    TILE_N: tl.constexpr = y0.shape[2] * y0.shape[3]
    if COLS == 1:
        enc = _tile_encode(
            tl.max(bits, 1, keep_dims=True), amax_t_ptr, st_ptr,
            tl.arange(0, G)[:, None, None, None] + (0 if ROWS == -1 else pid_m * G), cols,
            1 if ROWS == -1 else tl.cdiv(M, ROWS), N, stride_tm, stride_tn, ROWS != -1 or pid_m == 0,
            QMAX, EMAX, QMAX_MANTISSA, E8M0, POW2, ROWS == -1,
        )  # fmt: skip
    else:
        enc = _block_encode(
            bits, pid_m, pid_n, amax_t_ptr, st_ptr, M, N, stride_tm, stride_tn,
            ROWS, QMAX, EMAX, QMAX_MANTISSA, E8M0, POW2,
        )  # fmt: skip
    FORMAT: tl.constexpr = qt_ptr.dtype.element_ty
    MAY_SATURATE: tl.constexpr = E8M0 and not POW2
    q0 = _code(y0, enc, FORMAT, QMAX, MANTISSA_BITS, EMIN, MAY_SATURATE, DIRECT_CAST)
    q1 = _code(y1, enc, FORMAT, QMAX, MANTISSA_BITS, EMIN, MAY_SATURATE, DIRECT_CAST)
    q2 = _code(y2, enc, FORMAT, QMAX, MANTISSA_BITS, EMIN, MAY_SATURATE, DIRECT_CAST)
    q3 = _code(y3, enc, FORMAT, QMAX, MANTISSA_BITS, EMIN, MAY_SATURATE, DIRECT_CAST)
    if PACKED:
        word = q0.to(tl.uint32) | (q1.to(tl.uint32) << 8) | (q2.to(tl.uint32) << 16) | (q3.to(tl.uint32) << 24)
        # Two dims, because blocks of rows are adjacent in memory. Offsets in words show the compiler the alignment.
        word = tl.reshape(word, (WORDS, TILE_N))
        word_rows = pid_m * WORDS + tl.arange(0, WORDS)[:, None]
        word_cols = pid_n * TILE_N + tl.arange(0, TILE_N)[None, :]
        word_ptr = qt_ptr.to(tl.pointer_type(tl.uint32))
        tl.store(word_ptr + offsets(word_rows, word_cols, 1, words), word, mask=(word_rows < words) & (word_cols < N))
    else:
        bytes_ptr = qt_ptr.to(tl.pointer_type(tl.uint8)) + offsets(rows, cols, 1, M)
        tl.store(bytes_ptr, q0, mask=(rows < M) & (cols < N))
        tl.store(bytes_ptr + 1, q1, mask=(rows + 1 < M) & (cols < N))
        tl.store(bytes_ptr + 2, q2, mask=(rows + 2 < M) & (cols < N))
        tl.store(bytes_ptr + 3, q3, mask=(rows + 3 < M) & (cols < N))


@triton.jit
def quantize_tile_kernel(
    a_ptr, b_ptr, c_ptr, y_ptr, q_ptr, s_ptr, amax_ptr, qt_ptr, st_ptr, amax_t_ptr, M, N, words, size,
    stride_am, stride_an, stride_bm, stride_bn, stride_cm, stride_cn,
    stride_so, stride_sm, stride_sn, stride_to, stride_tm, stride_tn, stride_ao, stride_ato,
    ROWS: tl.constexpr, COLS: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, E8M0: tl.constexpr, POW2: tl.constexpr,
    ROWS_T: tl.constexpr, COLS_T: tl.constexpr, QMAX_T: tl.constexpr, EMAX_T: tl.constexpr,
    QMAX_MANTISSA_T: tl.constexpr, MANTISSA_BITS_T: tl.constexpr, EMIN_T: tl.constexpr, E8M0_T: tl.constexpr,
    POW2_T: tl.constexpr,
    NORMAL: tl.constexpr, TRANSPOSED: tl.constexpr, KEEP: tl.constexpr, PACKED: tl.constexpr,
    DIRECT_CAST: tl.constexpr, PRODUCER: tl.constexpr, ROUND_NORMALIZED: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Quantize the results of a producer in one or both orientations, tile by tile.

    Results are contiguous: ``q [O, M, N]``, ``qt [O, N, M]``, and with ``KEEP`` the unquantized ``y [O, M, N]``. Scales
    have strides. amax bits (int32, read for blocks of a whole dim) are contiguous. Blocks, scales and amax bits are in
    the coordinates of the input. With PACKED a row of ``qt`` is ``words`` = M / 4 whole 32-bit words; ``size`` is M N.
    A program walks over tiles; with STAGES above 1 it loads the next tiles while it computes.
    """
    begin(DEPENDENT)
    SQUARE: tl.constexpr = (NORMAL and ROWS == 128) or (TRANSPOSED and ROWS_T == 128 and COLS_T == 128)
    tl.static_assert(not SQUARE or (TILE_M == 128 and TILE_N == 128), "a square block is one tile")
    tl.static_assert(not SQUARE or not (NORMAL and TRANSPOSED), "ptxas crashes on the bytes that both would share")
    BLOCK_M: tl.constexpr = ROWS_T if TRANSPOSED and ROWS_T > 0 else TILE_M
    BLOCK_N: tl.constexpr = COLS if NORMAL and COLS > 0 else TILE_N
    tl.static_assert(TILE_M % BLOCK_M == 0 and TILE_N % BLOCK_N == 0 and BLOCK_M % 4 == 0, "a tile is whole blocks")
    DTYPE: tl.constexpr = a_ptr.dtype.element_ty
    RESULTS: tl.constexpr = 2 if PRODUCER == "silu_mul_backward" else 1
    tiles_n = tl.cdiv(N, TILE_N)
    tiles = tl.cdiv(M, TILE_M) * tiles_n
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        # Tiles run in reverse order: the last rows of the amax pass are still in L2.
        pid_m, pid_n = (tiles - 1 - tile) // tiles_n, (tiles - 1 - tile) % tiles_n
        rows = tile_rows(pid_m * TILE_M, TILE_M // BLOCK_M, BLOCK_M // 4, 4)
        cols = tile_cols(pid_n * TILE_N, TILE_N // BLOCK_N, BLOCK_N)
        x0, x1, x2, x3 = _load_four(
            a_ptr, b_ptr, c_ptr, rows, cols, M, N,
            stride_am, stride_an, stride_bm, stride_bn, stride_cm, stride_cn, PRODUCER,
        )  # fmt: skip
        for result in tl.static_range(RESULTS):
            if result == 1:
                # Load again from the cache: keeping the inputs costs registers of the first result.
                x0, x1, x2, x3 = _load_four(
                    a_ptr, b_ptr, c_ptr, rows, cols, M, N,
                    stride_am, stride_an, stride_bm, stride_bn, stride_cm, stride_cn, PRODUCER,
                )  # fmt: skip
            y0 = _value(x0, DTYPE, PRODUCER, ROUND_NORMALIZED, result)
            y1 = _value(x1, DTYPE, PRODUCER, ROUND_NORMALIZED, result)
            y2 = _value(x2, DTYPE, PRODUCER, ROUND_NORMALIZED, result)
            y3 = _value(x3, DTYPE, PRODUCER, ROUND_NORMALIZED, result)
            bits = _maximum_of_four(y0, y1, y2, y3)
            block_bits = _maximum_of_all(bits) if SQUARE else bits
            start = result * size
            if KEEP:
                _keep(y0, y_ptr + start, rows, cols, M, N)
                _keep(y1, y_ptr + start, rows + 1, cols, M, N)
                _keep(y2, y_ptr + start, rows + 2, cols, M, N)
                _keep(y3, y_ptr + start, rows + 3, cols, M, N)
            if NORMAL:
                _quantize_normal(
                    y0, y1, y2, y3, block_bits, rows, cols, pid_m, pid_n, q_ptr + start, s_ptr + result * stride_so,
                    amax_ptr + result * stride_ao, M, N, stride_sm, stride_sn,
                    ROWS, COLS, QMAX, EMAX, QMAX_MANTISSA, MANTISSA_BITS, EMIN, E8M0, POW2, DIRECT_CAST,
                )  # fmt: skip
            if TRANSPOSED:
                _quantize_transposed(
                    y0, y1, y2, y3, bits if COLS_T == 1 else block_bits, rows, cols, pid_m, pid_n, qt_ptr + start,
                    st_ptr + result * stride_to, amax_t_ptr + result * stride_ato, M, N, words, stride_tm, stride_tn,
                    ROWS_T, COLS_T, QMAX_T, EMAX_T, QMAX_MANTISSA_T, MANTISSA_BITS_T, EMIN_T, E8M0_T, POW2_T,
                    PACKED, DIRECT_CAST,
                )  # fmt: skip


@triton.jit
def partial_amax_of_result_kernel(
    a_ptr, b_ptr, c_ptr, row_ptr, col_ptr, whole_ptr, M, N,
    stride_am, stride_an, stride_bm, stride_bn, stride_cm, stride_cn, chunks, stride_part,
    ROW: tl.constexpr, COL: tl.constexpr, WHOLE: tl.constexpr, PRODUCER: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Partial maxima of the results of a producer, as ``partial_amax_kernel`` of ``cast/quantize.py``.

    Results are stored one after the other: ``row [parts, O, M]``, ``col [parts, O, N]``, ``whole [parts, O]``.
    """
    begin(DEPENDENT)
    RESULTS: tl.constexpr = 2 if PRODUCER == "silu_mul_backward" else 1
    DTYPE: tl.constexpr = a_ptr.dtype.element_ty
    tiles_n = tl.cdiv(N, TILE_N)
    chunk = tl.program_id(0) // tiles_n
    strip = tl.program_id(0) % tiles_n
    cols = tile_cols(strip * TILE_N, 1, TILE_N)
    # Zeros of the dtype of the magnitudes.
    first = tl.zeros((1, TILE_M, 1, TILE_N), magnitudes(tl.zeros((1,), DTYPE)).dtype)
    second = first
    for tile in tl.range(chunk, tl.cdiv(M, TILE_M), chunks):
        rows = tile_rows(tile * TILE_M, 1, TILE_M, 1)
        inputs = _load(
            a_ptr, b_ptr, c_ptr, rows, cols, M, N, stride_am, stride_an, stride_bm, stride_bn, stride_cm, stride_cn,
            PRODUCER,
        )  # fmt: skip
        for result in tl.static_range(RESULTS):
            values = magnitudes(_value(inputs, DTYPE, PRODUCER, False, result))
            if ROW:
                out = row_ptr + offsets(strip, result * M + rows, stride_part, 1)
                tl.store(out, reduce_max(values, 3, True), mask=rows < M)
            if COL or WHOLE:
                if result == 0:
                    first = tl.maximum(first, values)
                else:
                    second = tl.maximum(second, values)
    for result in tl.static_range(RESULTS):
        highest = reduce_max(second if result else first, 1, True)
        if COL:
            tl.store(col_ptr + offsets(chunk, result * N + cols, stride_part, 1), highest, mask=cols < N)
        if WHOLE:
            out = whole_ptr + tl.program_id(0) * RESULTS + result
            tl.store(out, reduce_max(tl.reshape(highest, (TILE_N,)), 0))


@triton.jit
def silu_mul_rows_kernel(
    gate_ptr, up_ptr, y_ptr, q_ptr, s_ptr, M, N, stride_gm, stride_gn, stride_um, stride_un, stride_sm, stride_sn,
    QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, E8M0: tl.constexpr, POW2: tl.constexpr,
    KEEP: tl.constexpr, DIRECT_CAST: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """SiLU-mul of whole rows, quantized rowwise; ``q`` and ``y [M, N]`` are contiguous."""
    begin(DEPENDENT)
    rows, cols = tile_rows(tl.program_id(0) * TILE_M, 1, TILE_M, 1), tile_cols(0, 1, TILE_N)
    inputs = _load(
        gate_ptr, up_ptr, gate_ptr, rows, cols, M, N, stride_gm, stride_gn, stride_um, stride_un, 0, 0, "silu_mul"
    )
    y = _value(inputs, gate_ptr.dtype.element_ty, "silu_mul", False, 0)
    if KEEP:
        _keep(y, y_ptr, rows, cols, M, N)
    quantize_rows(
        y, tl.zeros((1, 1, 1, 1), tl.float32), rows, cols, 0, q_ptr, s_ptr, s_ptr, M, N, stride_sm, stride_sn,
        1, -1, QMAX, EMAX, QMAX_MANTISSA, MANTISSA_BITS, EMIN, E8M0, POW2, False, DIRECT_CAST,
    )  # fmt: skip
