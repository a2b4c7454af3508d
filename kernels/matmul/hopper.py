"""Warp-specialized FP8 GEMM for Hopper that promotes every 128 of K at the speed of GEMMs that do not promote.

In plain Triton the tensor cores idle while a program adds a partial result to its float32 sum. Here two warp groups
(four warps each) own half of a tile's rows: one promotes while the other multiplies. A separate producer warp issues
TMA loads ahead of both. The same kernel serves scales in the epilogue, scales along K, and, without promotion, fast
accumulation. For small M the operands are swapped: weights become the rows (64 an instruction), tokens the columns (as
few as 8). To make the whole GPU read the weight, small M also splits K over programs, or takes tiles of 64 rows with
one warp group and more stages.

The structure follows CUTLASS's warp-specialized "cooperative" kernels and DeepSeek-AI's DeepGEMM.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from tritonfp8.kernels.matmul.pipeline import (
    WAVE_ROWS,
    fill_stage,
    next_stage,
    sum_fast,
    sum_overlapped,
    sum_promoted,
)
from tritonfp8.kernels.matmul.sizes import SCALE_VECTOR as MIN_SCALES
from tritonfp8.kernels.triton_names import tma_store

SCALE_VECTOR: gl.constexpr = gl.constexpr(MIN_SCALES)
WARP_SIZE: gl.constexpr = gl.constexpr(32)
GROUP_WARPS: gl.constexpr = gl.constexpr(4)
# Steps of K whose TMA loads start before the warp groups do: at small M a GEMM takes little longer than that start.
EARLY_STEPS: gl.constexpr = gl.constexpr(4)


@gluon.jit
def tile_origin(tile, tiles_m, tiles_n, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr):
    """First row and column of the ``tile``-th tile, in the order of ``tiles.tile_index``."""
    per_group = GROUP_M * tiles_n
    first_m = (tile // per_group) * GROUP_M
    rows = gl.minimum(tiles_m - first_m, GROUP_M)
    within = tile % per_group
    return (first_m + within % rows) * BLOCK_M, (within // rows) * BLOCK_N


@gluon.jit
def _pieces(sizes, split_k, SPLIT: gl.constexpr):
    """Number of work items: tiles, or with SPLIT tiles times splits of K."""
    _, _, tiles_m, tiles_n, _ = sizes
    if SPLIT:
        return tiles_m * tiles_n * split_k
    else:
        return tiles_m * tiles_n


@gluon.jit
def _piece(
    piece, sizes, split_k, SPLIT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr
):
    """Work item ``piece``, a tile or one split of its K: first row, first column, split, first and last step."""
    _, _, tiles_m, tiles_n, steps = sizes
    if SPLIT:
        tiles = tiles_m * tiles_n
        part = piece // tiles
        row, col = tile_origin(piece % tiles, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        return row, col, part, part * steps // split_k, (part + 1) * steps // split_k
    else:
        row, col = tile_origin(piece, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        return row, col, 0, 0, steps


@gluon.jit
def _load(
    a_desc, b_desc, a_scale, b_scale, shared, sizes, strides, split_k, filled,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, SPLIT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The producer warp: load all steps of this program's work items, after the ``filled`` first steps."""
    empty = shared[6]
    stage = filled % STAGES
    phase = filled // STAGES
    for piece in range(gl.program_id(0), _pieces(sizes, split_k, SPLIT), gl.num_programs(0)):
        row, col, _, first, last = _piece(piece, sizes, split_k, SPLIT, BLOCK_M, BLOCK_N, GROUP_M)
        # A new name: if the loop changed ``filled``, Triton would still use its value from before the loop.
        before = gl.where(piece == gl.program_id(0), filled, 0)
        for step in range(first + before, last):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            fill_stage(
                a_desc, b_desc, a_scale, b_scale, shared, strides, row, col, step, stage,
                A_ROWS, B_ROWS, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            stage, phase = next_stage(stage, phase, STAGES)


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
def read_rows(pointer, row, end, stride, layout: gl.constexpr):
    """Load an epilogue vector for the 64 rows of a wave."""
    rows = row + gl.arange(0, WAVE_ROWS, gl.SliceLayout(1, layout))
    return gl.load(pointer + rows * stride, mask=rows < end, other=0.0)


@gluon.jit
def read_columns(pointer, col, end, stride, COLUMNS: gl.constexpr):
    """Load an epilogue vector for the columns of a tile, spread over all threads: one or two registers each."""
    cols = col + gl.arange(0, COLUMNS, gl.BlockedLayout([1], [WARP_SIZE], [GROUP_WARPS], [0]))
    return gl.load(pointer + cols * stride, mask=cols < end, other=0.0)


@gluon.jit
def _finish(
    acc, out_desc, out_buf, a_scale, b_scale, bias, residual_ptr, row, col, out_row, M, N, stride_rm, stride_rn,
    SCALED: gl.constexpr, HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    SWAP: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Scales -> bias -> activation -> residual -> output dtype -> shared memory -> out."""
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    col_layout: gl.constexpr = gl.SliceLayout(0, layout)
    if SCALED:
        # One scale after the other: their product may over- or underflow float32 even if the result does not.
        acc *= gl.convert_layout(a_scale, row_layout)[:, None]
        acc *= gl.convert_layout(b_scale, col_layout)[None, :]
    if HAS_BIAS:
        if SWAP:
            acc += bias.to(gl.float32)[:, None]
        else:
            acc += gl.convert_layout(bias.to(gl.float32), col_layout)[None, :]
    acc = _activate(acc, ACTIVATION)
    if HAS_RESIDUAL:
        rows = row + gl.arange(0, acc.shape[0], row_layout)
        cols = col + gl.arange(0, acc.shape[1], col_layout)
        offsets = rows.to(gl.int64)[:, None] * stride_rm + cols.to(gl.int64)[None, :] * stride_rn
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        acc += gl.load(residual_ptr + offsets, mask=mask, other=0.0).to(gl.float32)
    tma.store_wait(0)
    if SWAP:
        out_buf.permute((1, 0)).store(acc.to(out_desc.dtype))
        fence_async_shared()
        tma_store(out_desc, [out_row + col, row], out_buf)
    else:
        out_buf.store(acc.to(out_desc.dtype))
        fence_async_shared()
        tma_store(out_desc, [out_row + row, col], out_buf)


@gluon.jit
def _store(
    acc, out_desc, out_buf, a_scale, b_scale0, b_scale1, bias0, bias1, residual_ptr, row, col, out_row, M, N,
    stride_rm, stride_rn,
    SCALED: gl.constexpr, HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    SWAP: gl.constexpr, HALVES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Epilogue of one wave. HALVES handles half of the columns at a time, in half the registers and shared memory."""
    if HALVES:
        HALF: gl.constexpr = acc.shape[1] // 2
        half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
        left, right = gl.split(acc.reshape((WAVE_ROWS, 2, HALF)).permute((0, 2, 1)))
        _finish(
            gl.convert_layout(left, half), out_desc, out_buf, a_scale, b_scale0, bias0, residual_ptr,
            row, col, out_row, M, N, stride_rm, stride_rn, SCALED, HAS_BIAS, ACTIVATION, HAS_RESIDUAL, SWAP, half,
        )  # fmt: skip
        _finish(
            gl.convert_layout(right, half), out_desc, out_buf, a_scale, b_scale1, bias1, residual_ptr,
            row, col + HALF, out_row, M, N, stride_rm, stride_rn, SCALED, HAS_BIAS, ACTIVATION, HAS_RESIDUAL, SWAP,
            half,
        )  # fmt: skip
    else:
        _finish(
            acc, out_desc, out_buf, a_scale, b_scale0, bias0, residual_ptr,
            row, col, out_row, M, N, stride_rm, stride_rn, SCALED, HAS_BIAS, ACTIVATION, HAS_RESIDUAL, SWAP, layout,
        )  # fmt: skip


@gluon.jit
def _multiply(
    out_desc, shared, pointers, sizes, strides, split_k,
    GROUP: gl.constexpr, WAVES: gl.constexpr, A_ROWS: gl.constexpr, B_ROWS: gl.constexpr,
    HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
    PROMOTE: gl.constexpr, SWAP: gl.constexpr, SPLIT: gl.constexpr, STAGGER: gl.constexpr,
    TIGHT: gl.constexpr, HALVES: gl.constexpr, OVERLAP: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A consumer warp group: WAVES waves of 64 rows, from row ``GROUP * WAVES * 64`` on, of each of its tiles."""
    a_scale_ptr, b_scale_ptr, bias_ptr, residual_ptr = pointers
    M, N, tiles_m, tiles_n, steps = sizes
    stride_rm, stride_rn, stride_am, _, stride_bn, _ = strides
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    # With SPLIT ``reduce_parts_kernel`` applies the scales.
    SCALED: gl.constexpr = A_ROWS == 0 and not SPLIT
    COLUMNS: gl.constexpr = BLOCK_N // 2 if HALVES else BLOCK_N
    turn = shared[7]
    out_buf = shared[4].index(GROUP)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    tile_phase = gl.to_tensor(0)
    for piece in range(gl.program_id(0), _pieces(sizes, split_k, SPLIT), gl.num_programs(0)):
        row, col, part, first, last = _piece(piece, sizes, split_k, SPLIT, BLOCK_M, BLOCK_N, GROUP_M)
        row += GROUP * WAVES * WAVE_ROWS
        # Load before the main loop, to hide the latency.
        a_scale0 = None
        a_scale1 = None
        b_scale0 = None
        b_scale1 = None
        bias0 = None
        bias1 = None
        if SCALED:
            a_scale0 = read_rows(a_scale_ptr, row, M, stride_am, layout)
            b_scale0 = read_columns(b_scale_ptr, col, N, stride_bn, COLUMNS)
            if WAVES == 2:
                a_scale1 = read_rows(a_scale_ptr, row + WAVE_ROWS, M, stride_am, layout)
            if HALVES:
                b_scale1 = read_columns(b_scale_ptr, col + COLUMNS, N, stride_bn, COLUMNS)
        if HAS_BIAS:
            if SWAP:
                bias0 = read_rows(bias_ptr, row, M, 1, layout)
            else:
                bias0 = read_columns(bias_ptr, col, N, 1, COLUMNS)
                if HALVES:
                    bias1 = read_columns(bias_ptr, col + COLUMNS, N, 1, COLUMNS)
        if PROMOTE and OVERLAP > 1:
            acc0, stage, phase = sum_overlapped(
                shared, pointers, strides, row, col, first, last, stage, phase,
                GROUP, A_ROWS, B_ROWS, BLOCK_N, STAGES, OVERLAP, layout,
            )  # fmt: skip
        elif PROMOTE:
            if STAGGER and GROUP == 1:
                # Start half a step after the other group, so that the two do not promote at the same time.
                mbarrier.wait(turn, tile_phase, pred=steps >= STAGES)
                tile_phase = tile_phase ^ 1
            acc0, acc1, stage, phase = sum_promoted(
                shared, pointers, strides, gl.minimum(row, M - 1), col, col, first, last, stage, phase,
                GROUP, WAVES, A_ROWS, B_ROWS, BLOCK_N, STAGES, STAGGER, TIGHT, layout,
            )  # fmt: skip
        else:
            acc0, acc1, stage, phase = sum_fast(
                shared, first, last, stage, phase, GROUP, WAVES, BLOCK_N, STAGES, layout
            )
        out_row = part * (tiles_n * BLOCK_N if SWAP else tiles_m * BLOCK_M)
        _store(
            acc0, out_desc, out_buf, a_scale0, b_scale0, b_scale1, bias0, bias1, residual_ptr, row, col, out_row,
            M, N, stride_rm, stride_rn, SCALED, HAS_BIAS, ACTIVATION, HAS_RESIDUAL, SWAP, HALVES, layout,
        )  # fmt: skip
        if WAVES == 2:
            _store(
                acc1, out_desc, out_buf, a_scale1, b_scale0, b_scale1, bias0, bias1, residual_ptr,
                row + WAVE_ROWS, col, out_row, M, N, stride_rm, stride_rn,
                SCALED, HAS_BIAS, ACTIVATION, HAS_RESIDUAL, SWAP, HALVES, layout,
            )  # fmt: skip
    tma.store_wait(0)


# Without this Triton compiles again whenever one of these values changes between divisible by 16, not divisible, and 1.
@gluon.jit(
    do_not_specialize=["M", "N", "K", "stride_rm", "stride_am", "stride_ak", "stride_bn", "stride_bk", "split_k"]
)
def hopper_matmul_kernel(
    a_desc, b_desc, out_desc, a_scale, b_scale, bias_ptr, residual_ptr, M, N, K,
    stride_rm, stride_rn, stride_am, stride_ak, stride_bn, stride_bk, split_k,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr,
    HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, HAS_RESIDUAL: gl.constexpr, STAGES: gl.constexpr,
    PROMOTE: gl.constexpr, SWAP: gl.constexpr, SPLIT: gl.constexpr, STAGGER: gl.constexpr,
    TIGHT: gl.constexpr, HALVES: gl.constexpr, OVERLAP: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """``out [M, N] = epilogue(a [M, K] @ b [N, K].T)``.

    PROMOTE promotes the sum to float32 every BLOCK_K of K, not only at the end of K. SWAP stores ``out.T``:
    ``out_desc`` then has the shape ``[N, M]``, and bias and residual belong to ``out.T``. SPLIT makes ``split_k``
    programs share K: ``out`` is then a float32 workspace ``[split_k * rows, columns]``, with one partial sum below the
    other, rows rounded up to whole tiles. Partial sums are not scaled and skip the epilogue.

    ``a_desc``, ``b_desc`` and ``out_desc`` are TMA descriptors with blocks ``[BLOCK_M, BLOCK_K]``, ``[BLOCK_N,
    BLOCK_K]`` and ``[64, BLOCK_N]`` (``[BLOCK_N, 64]`` if SWAP). A_ROWS and B_ROWS are the rows that share a scale if
    scales change every BLOCK_K of K; both are 0 for scales that are constant along K. A scale is a pointer with
    strides. If each row has its own scale at each step of K, it is a descriptor of the flat scale, with the rows of a
    step contiguous and blocks of a tile's rows (at least 32).

    A tile of BLOCK_M = 64 has one warp group, any other tile two. These change the speed only: STAGGER keeps the groups
    half a step apart. TIGHT promotes before the next wgmma starts, in fewer registers. OVERLAP starts it before the
    promotion, for so many steps in a row. HALVES stores half of the columns at a time.
    """
    GROUPS: gl.constexpr = 1 if BLOCK_M == WAVE_ROWS else 2
    WAVES: gl.constexpr = BLOCK_M // (GROUPS * WAVE_ROWS)
    gl.static_assert(not SWAP or (WAVES == 1 and not HALVES), "swapped tiles are of 64 or 128 rows, stored whole")
    gl.static_assert(OVERLAP == 1 or WAVES == 1, "two products a step leave no registers for one more")
    OUT_ROWS: gl.constexpr = BLOCK_N if SWAP else WAVE_ROWS
    OUT_COLS: gl.constexpr = WAVE_ROWS if SWAP else BLOCK_N // (2 if HALVES else 1)
    A_SCALES: gl.constexpr = BLOCK_M if BLOCK_M > SCALE_VECTOR else SCALE_VECTOR
    B_SCALES: gl.constexpr = BLOCK_N if BLOCK_N > SCALE_VECTOR else SCALE_VECTOR
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], b_desc.layout)
    out_bufs = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, OUT_ROWS, OUT_COLS], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    EARLY: gl.constexpr = EARLY_STEPS if EARLY_STEPS < STAGES else STAGES
    for stage in gl.static_range(EARLY):
        mbarrier.init(full.index(stage), count=1)
    # TMA loads arrive at these barriers next: the fence makes them visible to TMA.
    fence_async_shared()
    # TMA loads scales along K with the operands; other scales are read from global memory.
    scale_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    a_scale_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, A_SCALES], scale_layout)
    b_scale_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, B_SCALES], scale_layout)
    shared = (a_bufs, b_bufs, a_scale_bufs, b_scale_bufs, out_bufs, full, empty, turn)
    pointers = (a_scale, b_scale, bias_ptr, residual_ptr)
    sizes = (M, N, tiles_m, tiles_n, steps)
    strides = (stride_rm, stride_rn, stride_am, stride_ak, stride_bn, stride_bk)
    # As `begin` in the other kernels. Nothing above reads or writes global memory.
    if DEPENDENT:
        gdc_wait()
    row, col, _, first, last = _piece(gl.program_id(0), sizes, split_k, SPLIT, BLOCK_M, BLOCK_N, GROUP_M)
    filled = gl.minimum(last - first, EARLY)
    for stage in range(filled):
        fill_stage(
            a_desc, b_desc, a_scale, b_scale, shared, strides, row, col, first + stage, stage,
            A_ROWS, B_ROWS, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    # Init the other barriers while those loads are in flight: Triton synchronizes all warps after each init.
    for stage in gl.static_range(STAGES):
        if stage >= EARLY:
            mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    # Init this barrier only if it is used. Triton gives the memory of an unused barrier to a buffer, and an H200 that
    # was time-sliced between processes sometimes restored the barrier over the buffer's contents.
    if STAGGER:
        mbarrier.init(turn, count=1)
    if EARLY < STAGES:
        # The producer's TMA loads arrive at the barriers of later stages: make these visible to TMA too.
        fence_async_shared()
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (out_desc, shared, pointers, sizes, strides, split_k, gl.constexpr(0), WAVES, A_ROWS,
                             B_ROWS, HAS_BIAS, ACTIVATION, HAS_RESIDUAL, PROMOTE, SWAP, SPLIT, STAGGER, TIGHT, HALVES,
                             OVERLAP, BLOCK_M, BLOCK_N, GROUP_M, STAGES)),
                (_load, (a_desc, b_desc, a_scale, b_scale, shared, sizes, strides, split_k, filled, A_ROWS, B_ROWS,
                         SPLIT, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (out_desc, shared, pointers, sizes, strides, split_k, gl.constexpr(0), WAVES, A_ROWS,
                             B_ROWS, HAS_BIAS, ACTIVATION, HAS_RESIDUAL, PROMOTE, SWAP, SPLIT, STAGGER, TIGHT, HALVES,
                             OVERLAP, BLOCK_M, BLOCK_N, GROUP_M, STAGES)),
                (_multiply, (out_desc, shared, pointers, sizes, strides, split_k, gl.constexpr(1), WAVES, A_ROWS,
                             B_ROWS, HAS_BIAS, ACTIVATION, HAS_RESIDUAL, PROMOTE, SWAP, SPLIT, STAGGER, TIGHT, HALVES,
                             OVERLAP, BLOCK_M, BLOCK_N, GROUP_M, STAGES)),
                (_load, (a_desc, b_desc, a_scale, b_scale, shared, sizes, strides, split_k, filled, A_ROWS, B_ROWS,
                         SPLIT, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
