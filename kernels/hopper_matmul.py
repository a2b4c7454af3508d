"""FP8 matrix products for Hopper that promote every 128 of K at the speed of products that do not.

Plain Triton lets the tensor cores idle while a block adds a partial product to its float32 sum. Here two groups of four
warps each own half of the rows of a tile: while one promotes, the other multiplies. A warp of its own keeps the copy
engine ahead of both. The same kernel serves scales in the epilogue and scales along K.

The shape of the kernel follows CUTLASS's warp-specialized "cooperative" kernels and DeepSeek-AI's DeepGEMM.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tritonfp8.kernels.configs import SPECIALIZED_WAVE_ROWS

WAVE_ROWS: gl.constexpr = gl.constexpr(SPECIALIZED_WAVE_ROWS)


@gluon.jit
def _tile_origin(tile, tiles_m, tiles_n, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr):
    """First row and column of the ``tile``-th tile, in the order of ``tiles.tile_index``."""
    per_group = GROUP_M * tiles_n
    first_m = (tile // per_group) * GROUP_M
    rows = gl.minimum(tiles_m - first_m, GROUP_M)
    within = tile % per_group
    return (first_m + within % rows) * BLOCK_M, (within // rows) * BLOCK_N


@gluon.jit
def _next_stage(stage, phase, STAGES: gl.constexpr):
    wrapped = stage == STAGES - 1
    return gl.where(wrapped, 0, stage + 1), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def _load(
    a_desc, b_desc, a_scale, b_scale, shared, sizes, strides,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The producer: fills stage after stage, through all tiles of this program."""
    a_bufs, b_bufs, a_scale_bufs, b_scale_bufs, _, full, empty = shared
    _, _, tiles_m, tiles_n, steps = sizes
    _, _, _, stride_ak, _, stride_bk = strides
    SCALE_BYTES: gl.constexpr = 4 * ((BLOCK_M if A_ROWS == 1 else 0) + (BLOCK_N if B_ROWS == 1 else 0))
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, col = _tile_origin(tile, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        for step in range(steps):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, (BLOCK_M + BLOCK_N) * BLOCK_K + SCALE_BYTES)
            tma.async_copy_global_to_shared(a_desc, [row, step * BLOCK_K], ready, a_bufs.index(stage))
            tma.async_copy_global_to_shared(b_desc, [col, step * BLOCK_K], ready, b_bufs.index(stage))
            if A_ROWS == 1:
                tma.async_copy_global_to_shared(a_scale, [row + step * stride_ak], ready, a_scale_bufs.index(stage))
            if B_ROWS == 1:
                tma.async_copy_global_to_shared(b_scale, [col + step * stride_bk], ready, b_scale_bufs.index(stage))
            stage, phase = _next_stage(stage, phase, STAGES)


@gluon.jit
def _start(a_buf, b_buf, WAVE: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Start one wave of 64 rows times the tile of ``b``, over one stage."""
    zero = gl.zeros((WAVE_ROWS, BLOCK_N), gl.float32, layout)
    rows = a_buf.slice(WAVE * WAVE_ROWS, WAVE_ROWS)
    return warpgroup_mma(rows, b_buf.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _promote(acc, part, a_scale, b_scale, A_ROWS: gl.constexpr, B_ROWS: gl.constexpr):
    """Add a partial product; A_ROWS of 0 means that the scales wait for the epilogue."""
    if A_ROWS == 0:
        return acc + part
    elif A_ROWS == 1 and B_ROWS == 1:
        return acc + part * b_scale[None, :] * a_scale[:, None]
    elif A_ROWS == 1:
        return acc + part * (a_scale * b_scale)[:, None]
    elif B_ROWS == 1:
        return acc + part * (a_scale * b_scale)[None, :]
    else:
        return acc + part * (a_scale * b_scale)


@gluon.jit
def _read_scale(
    pointer, buf, row, step, stride_row, stride_step,
    FIRST: gl.constexpr, SIZE: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Scales of SIZE rows from FIRST on of the tile at ``row``: from shared memory, or the one of all from memory."""
    if ROWS == 1:
        return buf.slice(FIRST, SIZE).load(layout)
    else:
        return gl.load(pointer + (row // ROWS) * stride_row + step * stride_step)


@gluon.jit
def _activate(x, ACTIVATION: gl.constexpr):
    if ACTIVATION == "relu":
        return gl.where(x < 0.0, 0.0, x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "silu":
        return x / (1.0 + gl.exp(-x))
    else:
        return x


@gluon.jit
def _store(
    acc, out_desc, out_buf, a_scale_ptr, b_scale_ptr, bias_ptr, residual_ptr, row, col, M, N,
    stride_rm, stride_rn, stride_am, stride_bn, A_ROWS: gl.constexpr,
    HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    BLOCK_N: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Epilogue of one wave: scales -> bias -> activation -> residual -> output dtype -> shared memory -> out."""
    rows = row + gl.arange(0, WAVE_ROWS, gl.SliceLayout(1, layout))
    cols = col + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    if A_ROWS == 0:
        acc *= gl.load(a_scale_ptr + rows * stride_am, mask=rows < M, other=0.0)[:, None]
        acc *= gl.load(b_scale_ptr + cols * stride_bn, mask=cols < N, other=0.0)[None, :]
    if HAS_BIAS:
        acc += gl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(gl.float32)[None, :]
    acc = _activate(acc, ACTIVATION)
    if HAS_RESIDUAL:
        offsets = rows.to(gl.int64)[:, None] * stride_rm + cols.to(gl.int64)[None, :] * stride_rn
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        acc += gl.load(residual_ptr + offsets, mask=mask, other=0.0).to(gl.float32)
    tma.store_wait(0)
    out_buf.store(acc.to(out_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, col], out_buf)


@gluon.jit
def _multiply(
    out_desc, shared, pointers, sizes, strides,
    GROUP: gl.constexpr, WAVES: gl.constexpr, A_ROWS: gl.constexpr, B_ROWS: gl.constexpr,
    HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A consumer: rows ``[GROUP * WAVES * 64, +WAVES * 64)`` of every tile of this program, a wave of 64 at a time."""
    a_bufs, b_bufs, a_scale_bufs, b_scale_bufs, out_bufs, full, empty = shared
    a_scale_ptr, b_scale_ptr, bias_ptr, residual_ptr = pointers
    M, N, tiles_m, tiles_n, steps = sizes
    stride_rm, stride_rn, stride_am, stride_ak, stride_bn, stride_bk = strides
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    col_layout: gl.constexpr = gl.SliceLayout(0, layout)
    FIRST: gl.constexpr = GROUP * WAVES
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        row, col = _tile_origin(tile, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        row += FIRST * WAVE_ROWS
        acc0 = gl.zeros((WAVE_ROWS, BLOCK_N), gl.float32, layout)
        acc1 = acc0
        for step in range(steps):
            a_scale = 1.0
            b_scale = 1.0
            mbarrier.wait(full.index(stage), phase)
            a_buf = a_bufs.index(stage)
            b_buf = b_bufs.index(stage)
            token = _start(a_buf, b_buf, FIRST, BLOCK_N, layout)
            # Read while the tensor cores work: the wait for memory costs nothing.
            if A_ROWS != 0:
                a_scales = a_scale_bufs.index(stage)
                a_scale = _read_scale(
                    a_scale_ptr,
                    a_scales,
                    row,
                    step,
                    stride_am,
                    stride_ak,
                    FIRST * WAVE_ROWS,
                    WAVE_ROWS,
                    A_ROWS,
                    row_layout,
                )
                b_scale = _read_scale(
                    b_scale_ptr,
                    b_scale_bufs.index(stage),
                    col,
                    step,
                    stride_bn,
                    stride_bk,
                    0,
                    BLOCK_N,
                    B_ROWS,
                    col_layout,
                )
            part = warpgroup_mma_wait(0, deps=[token])
            if WAVES == 2:
                acc0 = _promote(acc0, part, a_scale, b_scale, A_ROWS, B_ROWS)
                token = _start(a_buf, b_buf, FIRST + 1, BLOCK_N, layout)
                if A_ROWS == 1:
                    a_scale = a_scales.slice((FIRST + 1) * WAVE_ROWS, WAVE_ROWS).load(row_layout)
                part = warpgroup_mma_wait(0, deps=[token])
                mbarrier.arrive(empty.index(stage), count=1)
                acc1 = _promote(acc1, part, a_scale, b_scale, A_ROWS, B_ROWS)
            else:
                mbarrier.arrive(empty.index(stage), count=1)
                acc0 = _promote(acc0, part, a_scale, b_scale, A_ROWS, B_ROWS)
            stage, phase = _next_stage(stage, phase, STAGES)
        out_buf = out_bufs.index(GROUP)
        _store(
            acc0, out_desc, out_buf, a_scale_ptr, b_scale_ptr, bias_ptr, residual_ptr, row, col, M, N,
            stride_rm, stride_rn, stride_am, stride_bn, A_ROWS, HAS_BIAS, ACTIVATION, HAS_RESIDUAL, BLOCK_N, layout,
        )  # fmt: skip
        if WAVES == 2:
            _store(
                acc1, out_desc, out_buf, a_scale_ptr, b_scale_ptr, bias_ptr, residual_ptr, row + WAVE_ROWS, col, M, N,
                stride_rm, stride_rn, stride_am, stride_bn, A_ROWS, HAS_BIAS, ACTIVATION, HAS_RESIDUAL, BLOCK_N, layout,
            )  # fmt: skip
    tma.store_wait(0)


# A value that turns from divisible by 16 to not, or to 1, is not worth another compilation.
@gluon.jit(do_not_specialize=["M", "N", "K", "stride_rm", "stride_ak", "stride_bk"])
def hopper_matmul_kernel(
    a_desc, b_desc, out_desc, a_scale, b_scale, bias_ptr, residual_ptr, M, N, K,
    stride_rm, stride_rn, stride_am, stride_ak, stride_bn, stride_bk,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr,
    HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, HAS_RESIDUAL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``out [M, N] = epilogue(a [M, K] @ b [N, K].T)``, promoted to float32 every BLOCK_K of K.

    ``a_desc``, ``b_desc`` and ``out_desc`` are TMA descriptors of blocks ``[BLOCK_M, BLOCK_K]``, ``[BLOCK_N,
    BLOCK_K]`` and ``[64, BLOCK_N]``. A_ROWS and B_ROWS are the rows that share a scale in operands scaled every BLOCK_K
    of K; both are 0 for scales that leave K whole. A scale is a pointer with its strides; where each row has its own
    for every step of K, it is a descriptor of the flat scale, a step's rows side by side, with blocks of a tile's rows.
    """
    WAVES: gl.constexpr = BLOCK_M // (2 * WAVE_ROWS)
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], b_desc.layout)
    out_bufs = gl.allocate_shared_memory(out_desc.dtype, [2, WAVE_ROWS, BLOCK_N], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    # Scales along K come with the operands; others are read from memory in the epilogue.
    scale_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    a_scale_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], scale_layout)
    b_scale_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N], scale_layout)
    shared = (a_bufs, b_bufs, a_scale_bufs, b_scale_bufs, out_bufs, full, empty)
    pointers = (a_scale, b_scale, bias_ptr, residual_ptr)
    sizes = (M, N, tiles_m, tiles_n, steps)
    strides = (stride_rm, stride_rn, stride_am, stride_ak, stride_bn, stride_bk)
    gl.warp_specialize(
        [
            (_multiply, (out_desc, shared, pointers, sizes, strides, gl.constexpr(0), WAVES, A_ROWS, B_ROWS,
                         HAS_BIAS, ACTIVATION, HAS_RESIDUAL, BLOCK_M, BLOCK_N, GROUP_M, STAGES)),
            (_multiply, (out_desc, shared, pointers, sizes, strides, gl.constexpr(1), WAVES, A_ROWS, B_ROWS,
                         HAS_BIAS, ACTIVATION, HAS_RESIDUAL, BLOCK_M, BLOCK_N, GROUP_M, STAGES)),
            (_load, (a_desc, b_desc, a_scale, b_scale, shared, sizes, strides, A_ROWS, B_ROWS,
                     BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
