"""The warp-specialized GEMM for Hopper (:mod:`tritonfp8.kernels.gemm.hopper_dense`) over groups of rows or of columns.

The groups differ in three things only: where the operands of a tile begin, how many steps of K it has, and how many of
its rows are stored. So pipeline and epilogue of the dense kernel are used as they are. A tile that reaches beyond its
group loads rows of the groups beside it, which it does not store: TMA stores whole tiles, other tiles are stored by
threads.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from tritonfp8.kernels.gemm.epilogue import (
    GROUP_WARPS,
    WARP_SIZE,
    Epilogue,
    Output,
    Vectors,
    Wave,
    read_halves,
    read_rows,
    store_wave,
)
from tritonfp8.kernels.gemm.hopper_dense import tile_origin
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
from tritonfp8.kernels.group_table import FIELDS as TABLE_FIELDS

FIELDS: gl.constexpr = gl.constexpr(TABLE_FIELDS.value)
# By which the producer tells the consumers a tile: the fields of its entry in the table and its first column take five.
TILE_WORDS: gl.constexpr = gl.constexpr(8)

# An entry of the table, and the first column of a tile: what the producer tells the consumers.
TileEntry = namedtuple("TileEntry", "group row end start col")


@gluon.jit
def _piece(piece, problem, SCHEDULE: gl.constexpr):
    """Row of the table, and first row and column of the tile; the row only where the table has none, of columns."""
    tiles_m, tiles_n = problem.tiles_m, problem.tiles_n
    if SCHEDULE.COLUMNS:
        per_group = tiles_m * tiles_n
        row, col = tile_origin(
            piece % per_group, tiles_m, tiles_n, SCHEDULE.BLOCK_M, SCHEDULE.BLOCK_N, SCHEDULE.GROUP_M
        )
        return piece // per_group, row, col
    else:
        tile, col = tile_origin(piece, tiles_m, tiles_n, 1, SCHEDULE.BLOCK_N, SCHEDULE.GROUP_M)
        return tile, 0, col


@gluon.jit
def _write_entry(buf, entry):
    word = gl.arange(0, TILE_WORDS, gl.BlockedLayout([1], [WARP_SIZE], [1], [0]))
    of_rows = gl.where(word == 0, entry.group, gl.where(word == 1, entry.row, entry.end))
    buf.store(gl.where(word < 3, of_rows, gl.where(word == 3, entry.start, entry.col)))


@gluon.jit
def _read_word(buf, WORD: gl.constexpr):
    return gl.max(buf.slice(WORD, 1).load(gl.BlockedLayout([1], [WARP_SIZE], [GROUP_WARPS], [0])), 0)


@gluon.jit
def _read_entry(buf):
    return TileEntry(_read_word(buf, 0), _read_word(buf, 1), _read_word(buf, 2), _read_word(buf, 3), _read_word(buf, 4))


@gluon.jit
def _steps(entry, problem, SCHEDULE: gl.constexpr):
    """First and last step of K. Rows of no group have none, so that their sums are zero, whatever the rows are."""
    if SCHEDULE.COLUMNS:
        first = (entry.start // SCHEDULE.ALIGNMENT + entry.group) * (SCHEDULE.ALIGNMENT // SCHEDULE.BLOCK_K)
        return first, first + gl.cdiv(entry.end - entry.start, SCHEDULE.BLOCK_K)
    else:
        return 0, gl.where(entry.group < problem.groups, problem.steps, 0)


@gluon.jit
def _load(a_desc, b_desc, table_ptr, ring, tile_bufs, problem, pieces, SCHEDULE: gl.constexpr):
    """The producer warp: find this program's tiles, tell the consumers, and load all steps.

    It is ahead of the consumers, so the tensor cores need not wait for divisions and reads of the table. The first
    stage of a tile says which it is; a tile without steps takes a stage for that alone.
    """
    stage = Stage(gl.to_tensor(0), gl.to_tensor(0))
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        index, row, col = _piece(piece, problem, SCHEDULE)
        at = table_ptr + index * FIELDS
        group, table_row, end, start = gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
        first_col = col
        if not SCHEDULE.COLUMNS:
            row = table_row
            first_col += group * problem.N
        entry = TileEntry(group, row, end, start, col)
        first, last = _steps(entry, problem, SCHEDULE)
        mbarrier.wait(ring.empty.index(stage.slot), stage.phase ^ 1)
        _write_entry(tile_bufs.index(stage.slot), entry)
        if first == last:
            mbarrier.arrive(ring.full.index(stage.slot), count=1)
            stage = next_stage(stage, SCHEDULE.STAGES)
        for step in range(first, last):
            mbarrier.wait(ring.empty.index(stage.slot), stage.phase ^ 1)
            fill_stage(a_desc, b_desc, problem, ring, row, first_col, step, stage.slot, SCHEDULE)
            stage = next_stage(stage, SCHEDULE.STAGES)


@gluon.jit
def _multiply(
    out_desc, out_ptr, ring, tile_bufs, problem, pieces,
    GROUP: gl.constexpr, SCHEDULE: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    """A consumer warp group: WAVES waves of 64 rows of each of its tiles, side by side or one below the other."""
    WIDTH: gl.constexpr = SCHEDULE.WIDTH
    WAVES: gl.constexpr = SCHEDULE.WAVES
    LAYOUT: gl.constexpr = SCHEDULE.LAYOUT
    HALVES: gl.constexpr = EPILOGUE.HALVES
    SIDE_BY_SIDE: gl.constexpr = SCHEDULE.BLOCK_N > WIDTH
    GROUP_ROWS: gl.constexpr = WAVE_ROWS if SIDE_BY_SIDE else WAVES * WAVE_ROWS
    M, N = problem.M, problem.N
    stage = Stage(gl.to_tensor(0), gl.to_tensor(0))
    turn = gl.to_tensor(0)
    for _ in range(gl.program_id(0), pieces, gl.num_programs(0)):
        mbarrier.wait(ring.full.index(stage.slot), stage.phase)
        entry = _read_entry(tile_bufs.index(stage.slot))
        row, col = entry.row, entry.col
        first, last = _steps(entry, problem, SCHEDULE)
        if first == last:
            mbarrier.arrive(ring.empty.index(stage.slot), count=1)
            stage = next_stage(stage, SCHEDULE.STAGES)
        if SCHEDULE.COLUMNS:
            is_group = entry.end > entry.start
            row_start = 0
            row_end = M
            out_row = entry.group * M + row
        else:
            is_group = entry.group < problem.groups
            row_start = entry.start
            row_end = entry.end
            out_row = row
        row += GROUP * GROUP_ROWS
        out_row += GROUP * GROUP_ROWS
        # A tile of no group, or of one without tokens, has no scales, and all its sums are zero.
        matrix = gl.where(is_group, entry.group, 0)
        scaled_rows = gl.where(is_group, row_end, 0)
        scaled_cols = gl.where(is_group, N, 0)
        a_scale0 = None
        a_scale1 = None
        b_scale0 = None
        b_scale1 = None
        bias0 = None
        bias1 = None
        # Load before the main loop, to hide the latency.
        if EPILOGUE.SCALED:
            a_first = problem.a_scale + matrix * problem.stride_ag
            b_first = problem.b_scale + matrix * problem.stride_bg
            a_scale0 = read_rows(a_first, row, scaled_rows, problem.stride_am, LAYOUT)
            b_scale0 = read_halves(b_first, col, scaled_cols, problem.stride_bn, WIDTH, HALVES)
            if SIDE_BY_SIDE:
                b_scale1 = read_halves(b_first, col + WIDTH, scaled_cols, problem.stride_bn, WIDTH, HALVES)
            elif WAVES == 2:
                a_scale1 = read_rows(a_first, row + WAVE_ROWS, scaled_rows, problem.stride_am, LAYOUT)
        if EPILOGUE.HAS_BIAS:
            bias = problem.bias + matrix * N
            bias0 = read_halves(bias, col, scaled_cols, 1, WIDTH, HALVES)
            if SIDE_BY_SIDE:
                bias1 = read_halves(bias, col + WIDTH, scaled_cols, 1, WIDTH, HALVES)
        b_scale = problem.b_scale
        if SCHEDULE.B_ROWS > 1:
            b_scale += matrix * problem.stride_bg
        tile = Tile(row, col, first, last)
        acc0, acc1, stage, turn = sum_steps(ring, problem, b_scale, tile, stage, turn, GROUP, SCHEDULE)
        out = Output(out_desc, ring.out.index(GROUP), out_ptr)
        wave = Wave(row, col, out_row, row_start - row, row_end - row)
        store_wave(acc0, out, wave, Vectors(a_scale0, b_scale0, bias0), problem, EPILOGUE, LAYOUT)
        if SIDE_BY_SIDE:
            beside = Wave(row, col + WIDTH, out_row, row_start - row, row_end - row)
            store_wave(acc1, out, beside, Vectors(a_scale0, b_scale1, bias1), problem, EPILOGUE, LAYOUT)
        elif WAVES == 2:
            below = Wave(row, col, out_row + WAVE_ROWS, row_start - row - WAVE_ROWS, row_end - row - WAVE_ROWS)
            store_wave(acc1, out, below, Vectors(a_scale1, b_scale0, bias0), problem, EPILOGUE, LAYOUT)
    tma.store_wait(0)


# Without this Triton compiles again whenever one of these values changes between divisible by 16, not divisible, and 1.
@gluon.jit(
    do_not_specialize=[
        "entries", "groups", "M", "N", "K", "stride_ag", "stride_bg", "stride_am", "stride_ak", "stride_bn",
        "stride_bk",
    ]
)  # fmt: skip
def hopper_grouped_kernel(
    a_desc, b_desc, out_desc, out_ptr, a_scale, b_scale, bias_ptr, table_ptr, entries, groups, M, N, K,
    stride_ag, stride_bg, stride_am, stride_ak, stride_bn, stride_bk,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    HAS_BIAS: gl.constexpr, STAGES: gl.constexpr, PROMOTE: gl.constexpr, STAGGER: gl.constexpr,
    TIGHT: gl.constexpr, SIDE_BY_SIDE: gl.constexpr, HALVES: gl.constexpr, OVERLAP: gl.constexpr,
    ALIGNMENT: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """A GEMM for each group: see ``grouped_matmul_kernel``.

    ``a_desc``, ``b_desc`` and ``out_desc`` are TMA descriptors of matrices, the matrices of all groups one below the
    other, with blocks ``[BLOCK_M, BLOCK_K]``, ``[BLOCK_N, BLOCK_K]`` and ``[64, columns]``. A warp group stores so many
    columns at once: those of a wave, or half of them if HALVES. A wave has all columns of the tile, or half of them if
    SIDE_BY_SIDE. Scales are as those of ``hopper_matmul_kernel``; ``stride_ag`` and ``stride_bg`` lead from those of a
    group to the next group's. Where A_ROWS and B_ROWS are -1, the operands are bf16 or fp16 and have no scales.
    """
    GROUPS: gl.constexpr = 1 if BLOCK_M == WAVE_ROWS else 2
    WAVES: gl.constexpr = 2 if SIDE_BY_SIDE else BLOCK_M // (GROUPS * WAVE_ROWS)
    OUT_COLS: gl.constexpr = BLOCK_N // (2 if SIDE_BY_SIDE else 1) // (2 if HALVES else 1)
    WIDTH: gl.constexpr = BLOCK_N // 2 if SIDE_BY_SIDE else BLOCK_N
    # An instruction takes 32 bytes of K.
    STEP: gl.constexpr = 256 // a_desc.dtype.primitive_bitwidth
    SCHEDULE: gl.constexpr = Schedule(
        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, A_ROWS, B_ROWS, WAVES, WIDTH,
        gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, STEP]), PROMOTE, STAGGER, TIGHT, OVERLAP,
        GROUPED=True, COLUMNS=COLUMNS, ALIGNMENT=ALIGNMENT,
    )  # fmt: skip
    ring = allocate(a_desc, b_desc, out_desc, WAVE_ROWS, OUT_COLS, SCHEDULE)
    tile_bufs = gl.allocate_shared_memory(gl.int32, [STAGES, TILE_WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for stage in gl.static_range(STAGES):
        mbarrier.init(ring.full.index(stage), count=1)
        mbarrier.init(ring.empty.index(stage), count=GROUPS)
    if STAGGER:
        mbarrier.init(ring.turn, count=1)
    # TMA loads arrive at these barriers: the fence makes them visible to TMA.
    fence_async_shared()
    # As `begin` in the other kernels. Nothing above reads or writes global memory.
    if DEPENDENT:
        gdc_wait()
    tiles_n = gl.cdiv(N, BLOCK_N)
    if COLUMNS:
        tiles_m = gl.cdiv(M, BLOCK_M)
        pieces = groups * tiles_m * tiles_n
    else:
        tiles_m = gl.load(table_ptr + entries * FIELDS)
        pieces = tiles_m * tiles_n
    problem = Problem(
        a_scale, b_scale, bias_ptr, None, M, N, tiles_m, tiles_n, gl.cdiv(K, BLOCK_K), groups, None, None,
        stride_ag, stride_bg, stride_am, stride_ak, stride_bn, stride_bk, None,
    )  # fmt: skip
    EPILOGUE: gl.constexpr = Epilogue(A_ROWS == 0, HAS_BIAS, HALVES, SHARED_TILES=True)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (out_desc, out_ptr, ring, tile_bufs, problem, pieces, gl.constexpr(0), SCHEDULE, EPILOGUE)),
                (_load, (a_desc, b_desc, table_ptr, ring, tile_bufs, problem, pieces, SCHEDULE)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (out_desc, out_ptr, ring, tile_bufs, problem, pieces, gl.constexpr(0), SCHEDULE, EPILOGUE)),
                (_multiply, (out_desc, out_ptr, ring, tile_bufs, problem, pieces, gl.constexpr(1), SCHEDULE, EPILOGUE)),
                (_load, (a_desc, b_desc, table_ptr, ring, tile_bufs, problem, pieces, SCHEDULE)),
            ],
            [4, 1],
            [240, 24],
        )
