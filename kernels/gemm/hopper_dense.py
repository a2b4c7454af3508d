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

from tritonfp8.kernels.gemm.epilogue import (
    Epilogue,
    Halves,
    Output,
    Vectors,
    Wave,
    read_columns,
    read_halves,
    read_rows,
    store_wave,
)
from tritonfp8.kernels.gemm.pipeline import (
    WAVE_ROWS,
    Problem,
    Schedule,
    Stage,
    Tile,
    allocate,
    fill_stage,
    next_stage,
    sum_steps,
)

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
def _pieces(problem, SPLIT: gl.constexpr):
    """Number of work items: tiles, or with SPLIT tiles times splits of K."""
    if SPLIT:
        return problem.tiles_m * problem.tiles_n * problem.split_k
    else:
        return problem.tiles_m * problem.tiles_n


@gluon.jit
def _piece(piece, problem, SCHEDULE: gl.constexpr):
    """Work item ``piece``, a tile or one split of its K, and which split."""
    BLOCK_M: gl.constexpr = SCHEDULE.BLOCK_M
    if SCHEDULE.SPLIT:
        tiles = problem.tiles_m * problem.tiles_n
        part = piece // tiles
        row, col = tile_origin(
            piece % tiles, problem.tiles_m, problem.tiles_n, BLOCK_M, SCHEDULE.BLOCK_N, SCHEDULE.GROUP_M
        )
        first = part * problem.steps // problem.split_k
        return Tile(row, col, first, (part + 1) * problem.steps // problem.split_k), part
    else:
        row, col = tile_origin(piece, problem.tiles_m, problem.tiles_n, BLOCK_M, SCHEDULE.BLOCK_N, SCHEDULE.GROUP_M)
        return Tile(row, col, 0, problem.steps), 0


@gluon.jit
def _load(a_desc, b_desc, problem, ring, filled, SCHEDULE: gl.constexpr):
    """The producer warp: load all steps of this program's work items, after the ``filled`` first steps."""
    stage = Stage(filled % SCHEDULE.STAGES, filled // SCHEDULE.STAGES)
    for piece in range(gl.program_id(0), _pieces(problem, SCHEDULE.SPLIT), gl.num_programs(0)):
        tile, _ = _piece(piece, problem, SCHEDULE)
        # A new name: if the loop changed ``filled``, Triton would still use its value from before the loop.
        before = gl.where(piece == gl.program_id(0), filled, 0)
        for step in range(tile.first + before, tile.last):
            mbarrier.wait(ring.empty.index(stage.slot), stage.phase ^ 1)
            fill_stage(a_desc, b_desc, problem, ring, tile.row, tile.col, step, stage.slot, SCHEDULE)
            stage = next_stage(stage, SCHEDULE.STAGES)


@gluon.jit
def _multiply(out_desc, ring, problem, GROUP: gl.constexpr, SCHEDULE: gl.constexpr, EPILOGUE: gl.constexpr):
    """A consumer warp group: WAVES waves of 64 rows of a tile, from row ``GROUP * WAVES * 64`` on.

    With PINGPONG the waves are the whole tile, and the group takes every other tile of the program.
    """
    PINGPONG: gl.constexpr = SCHEDULE.PINGPONG
    SHARE: gl.constexpr = 0 if PINGPONG else GROUP
    FIRST: gl.constexpr = GROUP if PINGPONG else 0
    TURNS: gl.constexpr = 2 if PINGPONG else 1
    HALVES: gl.constexpr = EPILOGUE.HALVES
    WAVES: gl.constexpr = SCHEDULE.WAVES
    LAYOUT: gl.constexpr = SCHEDULE.LAYOUT
    PART: gl.constexpr = SCHEDULE.BLOCK_N // 2 if HALVES else SCHEDULE.BLOCK_N
    M, N = problem.M, problem.N
    stage = Stage(gl.to_tensor(0), gl.to_tensor(0))
    turn = gl.to_tensor(0)
    programs = gl.num_programs(0)
    for piece in range(gl.program_id(0) + FIRST * programs, _pieces(problem, SCHEDULE.SPLIT), TURNS * programs):
        whole, part = _piece(piece, problem, SCHEDULE)
        row, col = whole.row + SHARE * WAVES * WAVE_ROWS, whole.col
        if PINGPONG:
            # The other group multiplies the steps in between, and has seen them all arrive before it passes the turn:
            # a wait for a stage tells only one phase from the next.
            before = piece // programs * problem.steps
            stage = Stage(before % SCHEDULE.STAGES, before // SCHEDULE.STAGES & 1)
            mbarrier.wait(ring.turn, 1 - GROUP)
        a_scale0 = None
        a_scale1 = None
        b_scale = None
        bias = None
        # Load before the main loop, to hide the latency.
        if EPILOGUE.SCALED:
            a_scale0 = read_rows(problem.a_scale, row, M, problem.stride_am, LAYOUT)
            b_left = read_columns(problem.b_scale, col, N, problem.stride_bn, PART)
            if WAVES == 2:
                a_scale1 = read_rows(problem.a_scale, row + WAVE_ROWS, M, problem.stride_am, LAYOUT)
            b_right = b_left
            if HALVES:
                b_right = read_columns(problem.b_scale, col + PART, N, problem.stride_bn, PART)
            b_scale = Halves(b_left, b_right)
        if EPILOGUE.HAS_BIAS:
            if EPILOGUE.SWAP:
                bias = read_rows(problem.bias, row, M, 1, LAYOUT)
            else:
                bias = read_halves(problem.bias, col, N, 1, SCHEDULE.BLOCK_N, HALVES)
        tile = Tile(row, col, whole.first, whole.last)
        acc0, acc1, stage, turn = sum_steps(ring, problem, problem.b_scale, tile, stage, turn, SHARE, SCHEDULE)
        out = Output(out_desc, ring.out.index(GROUP), None)
        if EPILOGUE.SWAP:
            out_row = part * (problem.tiles_n * SCHEDULE.BLOCK_N)
        else:
            out_row = part * (problem.tiles_m * SCHEDULE.BLOCK_M)
        wave = Wave(row, col, out_row, None, None)
        store_wave(acc0, out, wave, Vectors(a_scale0, b_scale, bias), problem, EPILOGUE, LAYOUT)
        if WAVES == 2:
            below = Wave(row + WAVE_ROWS, col, out_row, None, None)
            store_wave(acc1, out, below, Vectors(a_scale1, b_scale, bias), problem, EPILOGUE, LAYOUT)
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
    TIGHT: gl.constexpr, HALVES: gl.constexpr, OVERLAP: gl.constexpr, PINGPONG: gl.constexpr, DEPENDENT: gl.constexpr,
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
    promotion, for so many steps in a row. HALVES stores half of the columns at a time. PINGPONG gives the groups whole
    tiles in turn, so that one stores while the other multiplies.
    """
    GROUPS: gl.constexpr = 1 if BLOCK_M == WAVE_ROWS else 2
    # Groups that multiply the same stage.
    SHARERS: gl.constexpr = 1 if PINGPONG else GROUPS
    WAVES: gl.constexpr = BLOCK_M // (SHARERS * WAVE_ROWS)
    gl.static_assert(not SWAP or (WAVES == 1 and not HALVES), "swapped tiles are of 64 or 128 rows, stored whole")
    gl.static_assert(OVERLAP == 1 or WAVES == 1, "two products a step leave no registers for one more")
    gl.static_assert(not PINGPONG or (GROUPS == 2 and not (PROMOTE or SWAP or SPLIT)), "whole tiles have two groups")
    OUT_ROWS: gl.constexpr = BLOCK_N if SWAP else WAVE_ROWS
    OUT_COLS: gl.constexpr = WAVE_ROWS if SWAP else BLOCK_N // (2 if HALVES else 1)
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    SCHEDULE: gl.constexpr = Schedule(
        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, A_ROWS, B_ROWS, WAVES, BLOCK_N,
        gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32]), PROMOTE, STAGGER, TIGHT, OVERLAP, SPLIT=SPLIT,
        PINGPONG=PINGPONG,
    )  # fmt: skip
    ring = allocate(a_desc, b_desc, out_desc, OUT_ROWS, OUT_COLS, SCHEDULE)
    EARLY: gl.constexpr = EARLY_STEPS if EARLY_STEPS < STAGES else STAGES
    for stage in gl.static_range(EARLY):
        mbarrier.init(ring.full.index(stage), count=1)
    # TMA loads arrive at these barriers next: the fence makes them visible to TMA.
    fence_async_shared()
    problem = Problem(
        a_scale, b_scale, bias_ptr, residual_ptr, M, N, tiles_m, tiles_n, steps, None, stride_rm, stride_rn,
        None, None, stride_am, stride_ak, stride_bn, stride_bk, split_k,
    )  # fmt: skip
    # With SPLIT ``reduce_parts_kernel`` applies the scales.
    EPILOGUE: gl.constexpr = Epilogue(
        A_ROWS == 0 and not SPLIT, HAS_BIAS, HALVES, ACTIVATION=ACTIVATION, HAS_RESIDUAL=HAS_RESIDUAL, SWAP=SWAP
    )
    # As `begin` in the other kernels. Nothing above reads or writes global memory.
    if DEPENDENT:
        gdc_wait()
    tile, _ = _piece(gl.program_id(0), problem, SCHEDULE)
    filled = gl.minimum(tile.last - tile.first, EARLY)
    for stage in range(filled):
        fill_stage(a_desc, b_desc, problem, ring, tile.row, tile.col, tile.first + stage, stage, SCHEDULE)
    # Init the other barriers while those loads are in flight: Triton synchronizes all warps after each init.
    for stage in gl.static_range(STAGES):
        if stage >= EARLY:
            mbarrier.init(ring.full.index(stage), count=1)
        mbarrier.init(ring.empty.index(stage), count=SHARERS)
    # Init this barrier only if it is used. Triton gives the memory of an unused barrier to a buffer, and an H200 that
    # was time-sliced between processes sometimes restored the barrier over the buffer's contents.
    if STAGGER or PINGPONG:
        mbarrier.init(ring.turn, count=1)
    if EARLY < STAGES:
        # The producer's TMA loads arrive at the barriers of later stages: make these visible to TMA too.
        fence_async_shared()
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (out_desc, ring, problem, gl.constexpr(0), SCHEDULE, EPILOGUE)),
                (_load, (a_desc, b_desc, problem, ring, filled, SCHEDULE)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (out_desc, ring, problem, gl.constexpr(0), SCHEDULE, EPILOGUE)),
                (_multiply, (out_desc, ring, problem, gl.constexpr(1), SCHEDULE, EPILOGUE)),
                (_load, (a_desc, b_desc, problem, ring, filled, SCHEDULE)),
            ],
            [4, 1],
            [240, 24],
        )
