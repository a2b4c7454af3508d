"""AdamW on a weight that is stored in 8 bits: one pass over codes, gradient and moments.

If a program can have whole scale blocks, one launch does everything (``adamw_blocks_kernel``). Else one launch finds
the amaxes (``AMAX``), and another steps and rounds by them (``GIVEN``): its programs share scales, so the host writes
these afterwards. Tiles begin where blocks of the whole weight do, also if this rank has only a part of the first block.
"""

from collections import namedtuple

import triton
import triton.language as tl

from tritonfp8.kernels.numerics import (
    MAGNITUDE_MASK,
    NAN_BITS,
    block_amax,
    decode_e8m0,
    encode,
    encode_fp32,
    magnitude_bits,
    scale_blocks,
)
from tritonfp8.kernels.optim.exact import root_and_quotient
from tritonfp8.kernels.optim.rounding import (
    CODES,
    GROUP,
    MEANS,
    SQUARES,
    per_group,
    random_states,
    random_words,
    round_to_bfloat16,
    round_to_code,
)
from tritonfp8.kernels.pdl import begin

AMAX: tl.constexpr = tl.constexpr(0)
GIVEN: tl.constexpr = tl.constexpr(1)
# Of 8-bit moments: e4m3, 1x128.
MOMENT_COLS: tl.constexpr = tl.constexpr(128)
MOMENT_QMAX: tl.constexpr = tl.constexpr(448.0)
MOMENT_MANTISSA: tl.constexpr = tl.constexpr(3)
MOMENT_EMIN: tl.constexpr = tl.constexpr(-6)

# This rank's part ``[M, K]`` of a weight as codes with scales, its moments and their scales, its gradient.
StepTensors = namedtuple(
    "StepTensors", "q_ptr scale_ptr m_ptr v_ptr m_scale_ptr v_scale_ptr grad_ptr M K stride_sr stride_sc"
)
# The format of codes, the block of stored scales, and how a tile is stepped: see ``adamw_kernel``.
StepConstants = namedtuple(
    "StepConstants", "QMAX MANTISSA_BITS EMIN S_ROWS S_COLS SCALED STOCHASTIC EVEN ALIGNED TILE_M TILE_N"
)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _amax(x, R: tl.constexpr, C: tl.constexpr):
    """The bits of the largest magnitude of each R x C block, or of a NaN: ``[M, N]`` -> ``[M // R, N // C]``.

    As a float: the instruction of a maximum takes the magnitude as well.
    """
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    x = tl.abs(x)
    if C == N:
        found = tl.reduce(x, 1, _larger, keep_dims=True)
        if R > 1:
            found = tl.reduce(tl.reshape(found, (M // R, R)), 1, _larger, keep_dims=True)
    else:
        found = tl.reduce(tl.reshape(x, (M // R, R, N // C, C)), 3, _larger)
        found = tl.reduce(found, 1, _larger)
    return found.to(tl.int32, bitcast=True)


@triton.jit
def _least(a, b):
    return tl.minimum(a, b)


@triton.jit
def _per_block(x):
    """Of equal integers for each group of columns, one for each block of moments."""
    GROUPS: tl.constexpr = MOMENT_COLS // GROUP
    return tl.reduce(tl.reshape(x, (x.shape[0], x.shape[1] // GROUPS, GROUPS)), 2, _least)


@triton.jit
def _moment_scale(exponents):
    """Of exponents for each group of columns, for each column."""
    exponents = exponents.to(tl.int32)
    return per_group(tl.where(exponents == 255, NAN_BITS, exponents << 23).to(tl.float32, bitcast=True))


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
def _write_scaled_moment(
    x, states, ptr, scale_ptr, at, mask, scale_at, scale_mask, col_of_all, ALIGNED: tl.constexpr,
    SQUARE: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    enc, scale = encode_fp32(_amax(tl.where(mask, x, 0.0), 1, MOMENT_COLS), MOMENT_QMAX, True)
    scaled = scale_blocks(x, enc, 1, MOMENT_COLS)
    words = random_words(states, col_of_all, SQUARES if SQUARE else MEANS, ALIGNED, x.shape[1])
    codes = round_to_code(
        scaled, words, MOMENT_MANTISSA, MOMENT_EMIN, MOMENT_QMAX, STOCHASTIC, not SQUARE, True
    )  # fmt: skip
    if SQUARE:
        # A zero in the denominator of the step would make it infinite.
        codes = tl.maximum(codes, tl.minimum(scaled.to(tl.int32, bitcast=True), 1))
    tl.store(ptr + at, codes.to(tl.uint8).to(ptr.dtype.element_ty, bitcast=True), mask=mask)
    exponents = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
    # One thread stores a scale. If all threads of its block did, they would write to the same sector of the cache, and
    # wait for each other.
    tl.store(scale_ptr + _per_block(scale_at), exponents, mask=_per_block(scale_mask.to(tl.int32)) != 0)


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
def _read_scale(tensors, row, col, STEP: tl.constexpr):
    """The scales of a tile as they are stored, one for each group of columns."""
    S_ROWS: tl.constexpr = STEP.S_ROWS
    S_COLS: tl.constexpr = STEP.S_COLS
    TILE_N: tl.constexpr = STEP.TILE_N
    rows = row + tl.arange(0, STEP.TILE_M)
    inside = ((rows >= 0) & (rows < tensors.M))[:, None]
    at = (rows * 0 if S_ROWS == -1 else rows // S_ROWS).to(tl.int64)[:, None] * tensors.stride_sr
    parts = tl.arange(0, TILE_N // GROUP) // ((TILE_N if S_COLS == -1 else S_COLS) // GROUP)
    if S_COLS != -1:
        parts += col // S_COLS
        inside = inside & ((parts >= 0) & (parts < tl.cdiv(tensors.K, S_COLS)))[None, :]
    if STEP.EVEN:
        inside = tl.full((STEP.TILE_M, TILE_N // GROUP), True, tl.int1)
    return tl.load(tensors.scale_ptr + (at + parts.to(tl.int64)[None, :] * tensors.stride_sc), mask=inside, other=0)


@triton.jit
def _places(row, col, tensors, STEP: tl.constexpr):
    """Offsets and masks of the elements of a tile, and of the scales of its 8-bit moments for each group of columns.

    A thread loads the scale of its group. Of one thread for each scale, the others would get it by shared memory.
    """
    rows, cols = tl.arange(0, STEP.TILE_M), tl.arange(0, STEP.TILE_N)
    parts = tl.arange(0, STEP.TILE_N // GROUP) // (MOMENT_COLS // GROUP)
    # 64 bits for a tile, and 32 for the elements in it, which take half the registers.
    at = (tl.cast(row, tl.int64) * tensors.K + col) + (rows[:, None] * tensors.K + cols[None, :])
    per_row = tl.cdiv(tensors.K, MOMENT_COLS)
    first = col // MOMENT_COLS
    scale_at = (tl.cast(row, tl.int64) * per_row + first) + (rows[:, None] * per_row + parts[None, :])
    if STEP.EVEN:
        # The compiler leaves out what depends on them.
        mask = tl.full((STEP.TILE_M, STEP.TILE_N), True, tl.int1)
        scale_mask = tl.full((STEP.TILE_M, STEP.TILE_N // GROUP), True, tl.int1)
    else:
        mask_r = (row + rows >= 0) & (row + rows < tensors.M)
        mask = mask_r[:, None] & ((col + cols >= 0) & (col + cols < tensors.K))[None, :]
        scale_mask = mask_r[:, None] & (first + parts < per_row)[None, :]
    return at, mask, scale_at, scale_mask


@triton.jit
def _load_numbers(ptr):
    return (
        tl.load(ptr), tl.load(ptr + 1), tl.load(ptr + 2), tl.load(ptr + 3), tl.load(ptr + 4), tl.load(ptr + 5),
        tl.load(ptr + 6),
    )  # fmt: skip


@triton.jit
def _load(tensors, row, col, STEP: tl.constexpr):
    """What a step reads of a tile, as it is stored: weight, gradient and moments with their scales."""
    at, mask, scale_at, scale_mask = _places(row, col, tensors, STEP)
    scale = _read_scale(tensors, row, col, STEP)
    q = tl.load(tensors.q_ptr + at, mask=mask, other=0.0)
    grad = tl.load(tensors.grad_ptr + at, mask=mask, other=0.0)
    m, v = tl.load(tensors.m_ptr + at, mask=mask, other=0.0), tl.load(tensors.v_ptr + at, mask=mask, other=0.0)
    m_scale, v_scale = scale, scale
    if STEP.SCALED:
        m_scale = tl.load(tensors.m_scale_ptr + scale_at, mask=scale_mask, other=0)
        v_scale = tl.load(tensors.v_scale_ptr + scale_at, mask=scale_mask, other=0)
    return q, scale, grad, m, m_scale, v, v_scale


@triton.jit
def _step(loaded, numbers, mask, SCALED: tl.constexpr, COMPILED: tl.constexpr):
    """Weight, moments and the root of the second one after the step, in float32; weights outside are zero."""
    q, scale, grad, m, m_scale, v, v_scale = loaded
    decay, a, b2, b, step, c, eps = numbers
    scale = decode_e8m0(scale) if scale.dtype == tl.uint8 else scale
    grad, m, v = grad.to(tl.float32), m.to(tl.float32), v.to(tl.float32)
    if SCALED:
        m, v = m * _moment_scale(m_scale), v * _moment_scale(v_scale)
        v = v * v
    m = m + (grad - m) * a
    v = v * b2 + grad * grad * b
    root, quotient = root_and_quotient(v, m, c, eps, COMPILED)
    p = q.to(tl.float32) * per_group(scale * decay) - quotient * step
    # With an eps of zero it is NaN there.
    return tl.where(mask, p, 0.0), m, v, root


@triton.jit
def _write_moments(tensors, m, v, root, states, row, col, left_of_all, STEP: tl.constexpr):
    """Round and store the moments of a tile."""
    at, mask, scale_at, scale_mask = _places(row, col, tensors, STEP)
    col_of_all = left_of_all + col
    if STEP.SCALED:
        _write_scaled_moment(
            m, states, tensors.m_ptr, tensors.m_scale_ptr, at, mask, scale_at, scale_mask, col_of_all,
            STEP.ALIGNED, False, STEP.STOCHASTIC,
        )  # fmt: skip
        _write_scaled_moment(
            root, states, tensors.v_ptr, tensors.v_scale_ptr, at, mask, scale_at, scale_mask, col_of_all,
            STEP.ALIGNED, True, STEP.STOCHASTIC,
        )  # fmt: skip
    elif tensors.m_ptr.dtype.element_ty == tl.bfloat16:
        words = random_words(states, col_of_all, MEANS, STEP.ALIGNED, STEP.TILE_N)
        tl.store(tensors.m_ptr + at, round_to_bfloat16(m, words, STEP.STOCHASTIC), mask=mask)
        words = random_words(states, col_of_all, SQUARES, STEP.ALIGNED, STEP.TILE_N)
        tl.store(tensors.v_ptr + at, round_to_bfloat16(v, words, STEP.STOCHASTIC), mask=mask)
    else:
        tl.store(tensors.m_ptr + at, m, mask=mask)
        tl.store(tensors.v_ptr + at, v, mask=mask)


@triton.jit
def _write_codes(
    tensors, p, enc, states, row, col, left_of_all,
    R: tl.constexpr, C: tl.constexpr, BOUNDED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Round and store the weight of a tile."""
    at, mask, _, _ = _places(row, col, tensors, STEP)
    scaled = scale_blocks(p, enc, R, C)
    words = random_words(states, left_of_all + col, CODES, STEP.ALIGNED, STEP.TILE_N)
    codes = round_to_code(scaled, words, STEP.MANTISSA_BITS, STEP.EMIN, STEP.QMAX, STEP.STOCHASTIC, True, BOUNDED)
    tl.store(tensors.q_ptr + at, codes.to(tl.uint8).to(tensors.q_ptr.dtype.element_ty, bitcast=True), mask=mask)


@triton.jit
def adamw_kernel(
    q_ptr, scale_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, grad_ptr, numbers_ptr, keys_ptr, amax_ptr,
    M, K, above_all, left_of_all, above, left, stride_sr, stride_sc, grid_cols,
    ROWS: tl.constexpr, COLS: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, E8M0: tl.constexpr, POW2: tl.constexpr,
    S_ROWS: tl.constexpr, S_COLS: tl.constexpr, SCALED: tl.constexpr, STOCHASTIC: tl.constexpr, EVEN: tl.constexpr,
    ALIGNED: tl.constexpr, COMPILED: tl.constexpr, MODE: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A tile a program: AMAX or GIVEN.

    ``above_all`` and ``left_of_all`` are row and column of the first element in the whole weight, ``above`` and
    ``left`` in its block. The other arguments are those of ``reference.adamw``.
    """
    begin(DEPENDENT)
    tensors = StepTensors(
        q_ptr, scale_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, grad_ptr, M, K, stride_sr, stride_sc
    )  # fmt: skip
    STEP: tl.constexpr = StepConstants(
        QMAX, MANTISSA_BITS, EMIN, S_ROWS, S_COLS, SCALED, STOCHASTIC, EVEN, ALIGNED, TILE_M, TILE_N
    )
    R: tl.constexpr = TILE_M if ROWS == -1 or ROWS > TILE_M else ROWS
    C: tl.constexpr = TILE_N if COLS == -1 or COLS > TILE_N else COLS
    tiles_n = tl.cdiv(K + left, TILE_N)
    # Row and column of the tile, from the beginning of the first block. This rank may lack the first rows and columns.
    first_row = tl.program_id(0) // tiles_n * TILE_M
    first_col = tl.program_id(0) % tiles_n * TILE_N
    row, col = first_row - above, first_col - left
    loaded = _load(tensors, row, col, STEP)
    _, mask, _, _ = _places(row, col, tensors, STEP)
    p, m, v, root = _step(loaded, _load_numbers(numbers_ptr), mask, SCALED, COMPILED)
    block_rows = (first_row // ROWS if ROWS != -1 else 0) + tl.arange(0, TILE_M // R)
    block_cols = (first_col // COLS if COLS != -1 else 0) + tl.arange(0, TILE_N // C)
    grid_rows = tl.cdiv(M + above, ROWS) if ROWS != -1 else 1
    grid_at = block_rows.to(tl.int64)[:, None] * grid_cols + block_cols[None, :]
    in_grid = (block_rows < grid_rows)[:, None] & (block_cols < grid_cols)[None, :]
    if MODE == AMAX:
        tl.atomic_max(amax_ptr + grid_at, block_amax(magnitude_bits(p), R, C), mask=in_grid, sem="relaxed")
    else:
        given = tl.load(amax_ptr + grid_at, mask=in_grid, other=0) & MAGNITUDE_MASK
        enc, _ = encode(given, QMAX, EMAX, QMAX_MANTISSA, E8M0, POW2)
        states = random_states(keys_ptr, above_all + row, left_of_all + col, ALIGNED, TILE_M, TILE_N)
        _write_codes(tensors, p, enc, states, row, col, left_of_all, R, C, False, STEP)
        _write_moments(tensors, m, v, root, states, row, col, left_of_all, STEP)


@triton.jit
def adamw_blocks_kernel(
    q_ptr, scale_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, grad_ptr, numbers_ptr, keys_ptr,
    M, K, above_all, left_of_all, stride_sr, stride_sc,
    ROWS: tl.constexpr, COLS: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, E8M0: tl.constexpr, POW2: tl.constexpr,
    S_ROWS: tl.constexpr, S_COLS: tl.constexpr, SCALED: tl.constexpr, STOCHASTIC: tl.constexpr, EVEN: tl.constexpr,
    ALIGNED: tl.constexpr, COMPILED: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The whole step: a program has whole scale blocks, as DOWN x RIGHT tiles.

    It works on one tile after another and keeps only their weights until it knows their scale: registers do not hold
    the moments of so many elements.
    """
    begin(DEPENDENT)
    tensors = StepTensors(
        q_ptr, scale_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, grad_ptr, M, K, stride_sr, stride_sc
    )  # fmt: skip
    STEP: tl.constexpr = StepConstants(
        QMAX, MANTISSA_BITS, EMIN, S_ROWS, S_COLS, SCALED, STOCHASTIC, EVEN, ALIGNED, TILE_M, TILE_N
    )
    R: tl.constexpr = TILE_M if ROWS > TILE_M else ROWS
    C: tl.constexpr = TILE_N if COLS == -1 or COLS > TILE_N else COLS
    program = tl.program_id(0)
    if SCALED and DOWN > 1:
        # Programs that run at the same time are below each other: side by side, they would store scales of moments to
        # the same sectors of the cache, and wait for each other.
        down = tl.cdiv(M, DOWN * TILE_M)
        first_row, first_col = program % down * (DOWN * TILE_M), program // down * (RIGHT * TILE_N)
    else:
        across = tl.cdiv(K, RIGHT * TILE_N)
        first_row, first_col = program // across * (DOWN * TILE_M), program % across * (RIGHT * TILE_N)
    ROUNDED: tl.constexpr = m_ptr.dtype.element_ty != tl.float32
    # The next tile is read before the work on this one, as far as registers hold both: not float32 moments, nor scales
    # with masks; nor scales with the weights of the last tile of a square.
    AHEAD: tl.constexpr = (DOWN * RIGHT - (SCALED and DOWN > 1)) * (ROUNDED and (EVEN or not SCALED))
    numbers = _load_numbers(numbers_ptr)
    weights = ()
    largest = tl.zeros((TILE_M, TILE_N // GROUP), tl.float32)
    for i in tl.static_range(DOWN * RIGHT):
        row, col = first_row + i // RIGHT * TILE_M, first_col + i % RIGHT * TILE_N
        if i == 0 or i >= AHEAD:
            loaded = _load(tensors, row, col, STEP)
        here, states = loaded, 0
        if ROUNDED:
            states = random_states(keys_ptr, above_all + row, left_of_all + col, ALIGNED, TILE_M, TILE_N)
        if i + 1 < AHEAD:
            loaded = _load(tensors, first_row + (i + 1) // RIGHT * TILE_M, first_col + (i + 1) % RIGHT * TILE_N, STEP)
        _, mask, _, _ = _places(row, col, tensors, STEP)
        p, m, v, root = _step(here, numbers, mask, SCALED, COMPILED)
        _write_moments(tensors, m, v, root, states, row, col, left_of_all, STEP)
        # Of the elements of each thread, which takes no barrier: one reduction of all at the end.
        largest = _larger(largest, tl.reduce(tl.reshape(tl.abs(p), (TILE_M, TILE_N // GROUP, GROUP)), 2, _larger))
        weights += ((p, states),)
    enc, scale = encode(_amax(largest, R, C // GROUP), QMAX, EMAX, QMAX_MANTISSA, E8M0, POW2)
    for i in tl.static_range(DOWN * RIGHT):
        row, col = first_row + i // RIGHT * TILE_M, first_col + i % RIGHT * TILE_N
        p, states = weights[i]
        if not ROUNDED:
            states = random_states(keys_ptr, above_all + row, left_of_all + col, ALIGNED, TILE_M, TILE_N)
        _write_codes(tensors, p, enc, states, row, col, left_of_all, R, C, POW2, STEP)
    # All threads have read the scales before some overwrite them.
    tl.debug_barrier()
    # Where each row has exponents of its own, those of a block are written for each of its rows.
    for i in tl.static_range(DOWN):
        _write_scale(
            scale, scale_ptr, first_row + i * TILE_M, first_col, M, K, stride_sr, stride_sc, R, C, S_ROWS, S_COLS
        )  # fmt: skip
