"""AdamW on a weight that is stored in 8 bits: one pass over codes, gradient and moments.

If a program can have whole scale blocks, one launch does everything (``adamw_blocks_kernel``). Else one launch finds
the amaxes (``AMAX``), and another steps and rounds by them (``GIVEN``): its programs share scales, so the host writes
these afterwards. Tiles begin where blocks of the whole weight do, also if this rank has only a part of the first block.
"""

import triton
import triton.language as tl

from tritonfp8.kernels.numerics import (
    INFINITY_BITS,
    MAGNITUDE_MASK,
    block_amax,
    decode_e8m0,
    encode_e8m0,
    encode_fp32,
    magnitude_bits,
    scale_blocks,
)
from tritonfp8.kernels.pdl import begin

AMAX: tl.constexpr = tl.constexpr(0)
GIVEN: tl.constexpr = tl.constexpr(1)
RANDOM_BITS: tl.constexpr = tl.constexpr(20)
FIRST: tl.constexpr = tl.constexpr(0x7FEB352D)
SECOND: tl.constexpr = tl.constexpr(0x846CA68B)
THIRD: tl.constexpr = tl.constexpr(0x9E3779B1)
QUIET_NAN: tl.constexpr = tl.constexpr(0x7FC00000)
# Of 8-bit moments: e4m3, 1x128.
MOMENT_COLS: tl.constexpr = tl.constexpr(128)
MOMENT_QMAX: tl.constexpr = tl.constexpr(448.0)
MOMENT_MANTISSA: tl.constexpr = tl.constexpr(3)
MOMENT_EMIN: tl.constexpr = tl.constexpr(-6)


@triton.jit
def _hash32(x):
    x = (x ^ (x >> 16)) * tl.full((), FIRST, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), SECOND, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _random_words(keys_ptr, rows, cols, OF_MOMENTS: tl.constexpr):
    """``reference.optimizer.random_words``: those of codes, or those of moments."""
    first = tl.load(keys_ptr).to(tl.uint32, bitcast=True)
    second = tl.load(keys_ptr + 1).to(tl.uint32, bitcast=True)
    rows, cols = rows.to(tl.uint32)[:, None], cols.to(tl.uint32)[None, :]
    before = _hash32(rows ^ first)
    if OF_MOMENTS:
        before = _hash32(before ^ tl.full((), THIRD, tl.uint32))
    x = cols ^ before
    x = (x ^ (x >> 16)) * tl.full((), FIRST, tl.uint32)
    x = ((x ^ (x >> 15)) + _hash32(rows + second)) * tl.full((), SECOND, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _round_to_code(x, bits, MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, STOCHASTIC: tl.constexpr):
    """``reference.optimizer.round_to_code``: the value, still in float32."""
    LOST: tl.constexpr = 23 - MANTISSA_BITS
    LEAST: tl.constexpr = 2.0**EMIN
    magnitude = magnitude_bits(x).to(tl.float32, bitcast=True)
    shift = tl.where(magnitude < LEAST, LEAST, 0.0)
    pattern = tl.minimum((magnitude + shift).to(tl.int32, bitcast=True), QUIET_NAN)
    UNIT: tl.constexpr = 2**LOST
    added = bits.to(tl.int32) * (UNIT // 2**RANDOM_BITS) if STOCHASTIC else UNIT // 2
    rounded = ((pattern + added) & -UNIT).to(tl.float32, bitcast=True) - shift
    sign = x.to(tl.int32, bitcast=True) & ~MAGNITUDE_MASK
    return (rounded.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _read_moment(
    ptr, scale_ptr, at, mask, scale_at, scale_mask, SCALED: tl.constexpr, SQUARE: tl.constexpr
):  # fmt: skip
    x = tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        x = scale_blocks(x, decode_e8m0(tl.load(scale_ptr + scale_at, mask=scale_mask, other=0)), 1, MOMENT_COLS)
        if SQUARE:
            x = x * x
    return x


@triton.jit
def _write_moment(
    x, bits, ptr, scale_ptr, at, mask, scale_at, scale_mask,
    SCALED: tl.constexpr, SQUARE: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    if SCALED:
        if SQUARE:
            x = tl.sqrt_rn(x)
        amax = block_amax(magnitude_bits(tl.where(mask, x, 0.0)), 1, MOMENT_COLS)
        enc, scale = encode_fp32(amax, MOMENT_QMAX, True)
        scaled = scale_blocks(x, enc, 1, MOMENT_COLS)
        rounded = _round_to_code(scaled, bits, MOMENT_MANTISSA, MOMENT_EMIN, STOCHASTIC)
        if SQUARE:
            least: tl.constexpr = 2.0 ** (MOMENT_EMIN - MOMENT_MANTISSA)
            rounded = tl.where((scaled > 0) & (rounded < least), least, rounded)
        tl.store(ptr + at, rounded.to(ptr.dtype.element_ty), mask=mask)
        exponents = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
        tl.store(scale_ptr + scale_at, exponents, mask=scale_mask)
    elif ptr.dtype.element_ty == tl.bfloat16:
        pattern = x.to(tl.int32, bitcast=True)
        added = (bits >> (RANDOM_BITS - 16)).to(tl.int32) if STOCHASTIC else 0x8000
        rounded = ((pattern + added) & ~0xFFFF).to(tl.float32, bitcast=True)
        x = tl.where((pattern & MAGNITUDE_MASK) < INFINITY_BITS, rounded, x)
        tl.store(ptr + at, x.to(tl.bfloat16), mask=mask)
    else:
        tl.store(ptr + at, x, mask=mask)


@triton.jit
def _repeated(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Each element of ``x [A, B]`` ROWS x COLS times: ``[A * ROWS, B * COLS]``."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    if ROWS != 1:
        x = tl.reshape(tl.broadcast_to(tl.reshape(x, (A, 1, B)), (A, ROWS, B)), (A * ROWS, B))
    if COLS != 1:
        M: tl.constexpr = x.shape[0]
        x = tl.reshape(tl.broadcast_to(tl.reshape(x, (M, B, 1)), (M, B, COLS)), (M, B * COLS))
    return x


@triton.jit
def _write_scale(
    scale, ptr, first_row, first_col, M, K, stride_r, stride_c,
    R: tl.constexpr, C: tl.constexpr, S_ROWS: tl.constexpr, S_COLS: tl.constexpr,
):  # fmt: skip
    """Store the scale of each R x C block of a tile once for each S_ROWS x S_COLS elements."""
    if S_ROWS == 1 and R != 1:
        scale = _repeated(scale, R, 1)
    if S_COLS != -1 and S_COLS != C:
        scale = _repeated(scale, 1, C // S_COLS)
    step_r: tl.constexpr = R if S_ROWS == -1 else S_ROWS
    step_c: tl.constexpr = C if S_COLS == -1 else S_COLS
    rows = first_row + tl.arange(0, scale.shape[0]) * step_r
    cols = first_col + tl.arange(0, scale.shape[1]) * step_c
    at = (rows // step_r).to(tl.int64)[:, None] * stride_r + (cols // step_c).to(tl.int64)[None, :] * stride_c
    if ptr.dtype.element_ty == tl.uint8 and scale.dtype != tl.uint8:
        scale = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
    tl.store(ptr + at, scale, mask=(rows < M)[:, None] & (cols < K)[None, :])


@triton.jit
def _read_scale(ptr, row, col, M, K, stride_r, stride_c, S_ROWS: tl.constexpr, S_COLS: tl.constexpr,
                TILE_M: tl.constexpr, TILE_N: tl.constexpr):  # fmt: skip
    """The scales of a tile: ``[TILE_M, 1]`` or, for each S_COLS columns, ``[TILE_M, TILE_N // S_COLS]``."""
    rows = row + tl.arange(0, TILE_M)
    inside = ((rows >= 0) & (rows < M))[:, None]
    at = (rows * 0 if S_ROWS == -1 else rows // S_ROWS).to(tl.int64)[:, None] * stride_r
    if S_COLS != -1:
        parts = col // S_COLS + tl.arange(0, TILE_N // S_COLS)
        inside = inside & ((parts >= 0) & (parts < tl.cdiv(K, S_COLS)))[None, :]
        at = at + parts.to(tl.int64)[None, :] * stride_c
    scale = tl.load(ptr + at, mask=inside, other=0)
    return decode_e8m0(scale) if ptr.dtype.element_ty == tl.uint8 else scale


@triton.jit
def _places(row, col, M, K, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Offsets and masks of the elements of a tile, and of the scales of its 8-bit moments."""
    rows, cols = tl.arange(0, TILE_M), tl.arange(0, TILE_N)
    mask_r = (row + rows >= 0) & (row + rows < M)
    mask = mask_r[:, None] & ((col + cols >= 0) & (col + cols < K))[None, :]
    # 64 bits for a tile, and 32 for the elements in it, which take half the registers.
    at = (tl.cast(row, tl.int64) * K + col) + (rows[:, None] * K + cols[None, :])
    groups = tl.arange(0, TILE_N // MOMENT_COLS)
    per_row = tl.cdiv(K, MOMENT_COLS)
    first = col // MOMENT_COLS
    scale_at = (tl.cast(row, tl.int64) * per_row + first) + (rows[:, None] * per_row + groups[None, :])
    return at, mask, scale_at, mask_r[:, None] & (first + groups < per_row)[None, :]


@triton.jit
def _step(
    q_ptr, scale_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, grad_ptr, numbers_ptr, row, col, M, K,
    stride_sr, stride_sc, S_ROWS: tl.constexpr, S_COLS: tl.constexpr, SCALED: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Weight and moments of a tile after the step, in float32; zeros outside of the weight."""
    at, mask, scale_at, scale_mask = _places(row, col, M, K, TILE_M, TILE_N)
    scale = _read_scale(scale_ptr, row, col, M, K, stride_sr, stride_sc, S_ROWS, S_COLS, TILE_M, TILE_N)
    p = tl.load(q_ptr + at, mask=mask, other=0.0).to(tl.float32)
    p = scale_blocks(p, scale, 1, TILE_N if S_COLS == -1 else S_COLS) * tl.load(numbers_ptr)
    grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
    m = _read_moment(m_ptr, m_scale_ptr, at, mask, scale_at, scale_mask, SCALED, False)
    v = _read_moment(v_ptr, v_scale_ptr, at, mask, scale_at, scale_mask, SCALED, True)
    m = m + (grad - m) * tl.load(numbers_ptr + 1)
    v = v * tl.load(numbers_ptr + 2) + grad * grad * tl.load(numbers_ptr + 3)
    denominator = tl.sqrt_rn(v) * tl.load(numbers_ptr + 5) + tl.load(numbers_ptr + 6)
    p = p - tl.div_rn(m, denominator) * tl.load(numbers_ptr + 4)
    # With an eps of zero it is NaN there.
    return tl.where(mask, p, 0.0), m, v


@triton.jit
def _words_of_tile(keys_ptr, row, col, above_all, left_of_all, OF_MOMENTS: tl.constexpr, STOCHASTIC: tl.constexpr,
                   TILE_M: tl.constexpr, TILE_N: tl.constexpr):  # fmt: skip
    """A random word for each element of a tile, if rounding needs any."""
    if STOCHASTIC:
        rows, cols = above_all + row + tl.arange(0, TILE_M), left_of_all + col + tl.arange(0, TILE_N)
        return _random_words(keys_ptr, rows, cols, OF_MOMENTS)
    else:
        return 0


@triton.jit
def _write_moments(
    m, v, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, keys_ptr, row, col, above_all, left_of_all, M, K,
    SCALED: tl.constexpr, STOCHASTIC: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Round and store the moments of a tile."""
    at, mask, scale_at, scale_mask = _places(row, col, M, K, TILE_M, TILE_N)
    words = _words_of_tile(keys_ptr, row, col, above_all, left_of_all, True, STOCHASTIC, TILE_M, TILE_N)
    bits_m, bits_v = words >> (32 - RANDOM_BITS), (words & 0xFFFF) << (RANDOM_BITS - 16)
    _write_moment(m, bits_m, m_ptr, m_scale_ptr, at, mask, scale_at, scale_mask, SCALED, False, STOCHASTIC)
    _write_moment(v, bits_v, v_ptr, v_scale_ptr, at, mask, scale_at, scale_mask, SCALED, True, STOCHASTIC)


@triton.jit
def _write_codes(
    p, enc, q_ptr, keys_ptr, row, col, above_all, left_of_all, M, K, R: tl.constexpr, C: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, STOCHASTIC: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):  # fmt: skip
    """Round and store the weight of a tile."""
    at, mask, _, _ = _places(row, col, M, K, TILE_M, TILE_N)
    words = _words_of_tile(keys_ptr, row, col, above_all, left_of_all, False, STOCHASTIC, TILE_M, TILE_N)
    bits = words >> (32 - RANDOM_BITS)
    rounded = _round_to_code(scale_blocks(p, enc, R, C), bits, MANTISSA_BITS, EMIN, STOCHASTIC)
    tl.store(q_ptr + at, rounded.to(q_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _encode(bits, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr, E8M0: tl.constexpr,
            POW2: tl.constexpr):  # fmt: skip
    if E8M0:
        return encode_e8m0(bits, EMAX, QMAX_MANTISSA, POW2)
    else:
        return encode_fp32(bits, QMAX, POW2)


@triton.jit
def adamw_kernel(
    q_ptr, scale_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, grad_ptr, numbers_ptr, keys_ptr, amax_ptr,
    M, K, above_all, left_of_all, above, left, stride_sr, stride_sc, grid_cols,
    ROWS: tl.constexpr, COLS: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, E8M0: tl.constexpr, POW2: tl.constexpr,
    S_ROWS: tl.constexpr, S_COLS: tl.constexpr, SCALED: tl.constexpr, STOCHASTIC: tl.constexpr,
    MODE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A tile a program: AMAX or GIVEN.

    ``above_all`` and ``left_of_all`` are row and column of the first element in the whole weight, ``above`` and
    ``left`` in its block. The other arguments are those of ``reference.adamw``.
    """
    begin(DEPENDENT)
    R: tl.constexpr = TILE_M if ROWS == -1 or ROWS > TILE_M else ROWS
    C: tl.constexpr = TILE_N if COLS == -1 or COLS > TILE_N else COLS
    tiles_n = tl.cdiv(K + left, TILE_N)
    # Row and column of the tile, from the beginning of the first block. This rank may lack the first rows and columns.
    first_row = tl.program_id(0) // tiles_n * TILE_M
    first_col = tl.program_id(0) % tiles_n * TILE_N
    row, col = first_row - above, first_col - left
    p, m, v = _step(
        q_ptr, scale_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, grad_ptr, numbers_ptr, row, col, M, K,
        stride_sr, stride_sc, S_ROWS, S_COLS, SCALED, TILE_M, TILE_N,
    )  # fmt: skip
    block_rows = (first_row // ROWS if ROWS != -1 else 0) + tl.arange(0, TILE_M // R)
    block_cols = (first_col // COLS if COLS != -1 else 0) + tl.arange(0, TILE_N // C)
    grid_rows = tl.cdiv(M + above, ROWS) if ROWS != -1 else 1
    grid_at = block_rows.to(tl.int64)[:, None] * grid_cols + block_cols[None, :]
    in_grid = (block_rows < grid_rows)[:, None] & (block_cols < grid_cols)[None, :]
    if MODE == AMAX:
        tl.atomic_max(amax_ptr + grid_at, block_amax(magnitude_bits(p), R, C), mask=in_grid, sem="relaxed")
    else:
        given = tl.load(amax_ptr + grid_at, mask=in_grid, other=0) & MAGNITUDE_MASK
        enc, _ = _encode(given, QMAX, EMAX, QMAX_MANTISSA, E8M0, POW2)
        _write_codes(
            p, enc, q_ptr, keys_ptr, row, col, above_all, left_of_all, M, K, R, C, MANTISSA_BITS, EMIN, STOCHASTIC,
            TILE_M, TILE_N,
        )  # fmt: skip
        _write_moments(
            m, v, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, keys_ptr, row, col, above_all, left_of_all, M, K,
            SCALED, STOCHASTIC, TILE_M, TILE_N,
        )  # fmt: skip


@triton.jit
def adamw_blocks_kernel(
    q_ptr, scale_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, grad_ptr, numbers_ptr, keys_ptr,
    M, K, above_all, left_of_all, stride_sr, stride_sc,
    ROWS: tl.constexpr, COLS: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, E8M0: tl.constexpr, POW2: tl.constexpr,
    S_ROWS: tl.constexpr, S_COLS: tl.constexpr, SCALED: tl.constexpr, STOCHASTIC: tl.constexpr,
    DOWN: tl.constexpr, RIGHT: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The whole step: a program has whole scale blocks, as DOWN x RIGHT tiles.

    It works on one tile after another and keeps only their weights until it knows their scale: registers do not hold
    the moments of so many elements.
    """
    begin(DEPENDENT)
    R: tl.constexpr = TILE_M if ROWS > TILE_M else ROWS
    C: tl.constexpr = TILE_N if COLS == -1 or COLS > TILE_N else COLS
    across = tl.cdiv(K, RIGHT * TILE_N)
    first_row = tl.program_id(0) // across * (DOWN * TILE_M)
    first_col = tl.program_id(0) % across * (RIGHT * TILE_N)
    weights = ()
    amax = tl.zeros((TILE_M // R, TILE_N // C), tl.int32)
    for i in tl.static_range(DOWN * RIGHT):
        row, col = first_row + i // RIGHT * TILE_M, first_col + i % RIGHT * TILE_N
        p, m, v = _step(
            q_ptr, scale_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, grad_ptr, numbers_ptr, row, col, M, K,
            stride_sr, stride_sc, S_ROWS, S_COLS, SCALED, TILE_M, TILE_N,
        )  # fmt: skip
        _write_moments(
            m, v, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, keys_ptr, row, col, above_all, left_of_all, M, K,
            SCALED, STOCHASTIC, TILE_M, TILE_N,
        )  # fmt: skip
        amax = tl.maximum(amax, block_amax(magnitude_bits(p), R, C))
        weights += (p,)
    enc, scale = _encode(amax, QMAX, EMAX, QMAX_MANTISSA, E8M0, POW2)
    for i in tl.static_range(DOWN * RIGHT):
        row, col = first_row + i // RIGHT * TILE_M, first_col + i % RIGHT * TILE_N
        _write_codes(
            weights[i], enc, q_ptr, keys_ptr, row, col, above_all, left_of_all, M, K, R, C, MANTISSA_BITS, EMIN,
            STOCHASTIC, TILE_M, TILE_N,
        )  # fmt: skip
    # All threads have read the scales before some overwrite them.
    tl.debug_barrier()
    # Where each row has exponents of its own, those of a block are written for each of its rows.
    for i in tl.static_range(DOWN):
        _write_scale(
            scale, scale_ptr, first_row + i * TILE_M, first_col, M, K, stride_sr, stride_sc, R, C, S_ROWS, S_COLS
        )  # fmt: skip
