"""The warp-specialized GEMM for Hopper (:mod:`tritonfp8.kernels.matmul.hopper`) over groups of rows or of columns.

The groups differ in three things only: where the operands of a tile begin, how many steps of K it has, and how many of
its rows are stored. So the loads and the sums of the dense kernel are used as they are. A tile that reaches beyond its
group loads rows of the groups beside it, which it does not store: TMA stores whole tiles, other tiles are stored by
threads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from tritonfp8.kernels.matmul.hopper import (
    GROUP_WARPS,
    SCALE_VECTOR,
    WARP_SIZE,
    read_columns,
    read_rows,
    tile_origin,
)
from tritonfp8.kernels.matmul.pipeline import (
    WAVE_ROWS,
    fill_stage,
    next_stage,
    sum_fast,
    sum_overlapped,
    sum_promoted,
)
from tritonfp8.kernels.moe.schedule import FIELDS as TABLE_FIELDS
from tritonfp8.kernels.triton_names import tma_store

FIELDS: gl.constexpr = gl.constexpr(TABLE_FIELDS.value)
# By which the producer tells the consumers a tile: the fields of its entry in the table and its first column take five.
TILE_WORDS: gl.constexpr = gl.constexpr(8)


@gluon.jit
def _piece(piece, sizes, COLUMNS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr):
    """Row of the table, and first row and column of the tile; the row only where the table has none, of columns."""
    _, _, tiles_m, tiles_n, _, _ = sizes
    if COLUMNS:
        per_group = tiles_m * tiles_n
        row, col = tile_origin(piece % per_group, tiles_m, tiles_n, BLOCK_M, BLOCK_N, GROUP_M)
        return piece // per_group, row, col
    else:
        tile, col = tile_origin(piece, tiles_m, tiles_n, 1, BLOCK_N, GROUP_M)
        return tile, 0, col


@gluon.jit
def _write_tile(buf, group, row, end, start, col):
    """Tell the consumers a tile."""
    word = gl.arange(0, TILE_WORDS, gl.BlockedLayout([1], [WARP_SIZE], [1], [0]))
    of_rows = gl.where(word == 0, group, gl.where(word == 1, row, end))
    buf.store(gl.where(word < 3, of_rows, gl.where(word == 3, start, col)))


@gluon.jit
def _read_word(buf, WORD: gl.constexpr):
    return gl.max(buf.slice(WORD, 1).load(gl.BlockedLayout([1], [WARP_SIZE], [GROUP_WARPS], [0])), 0)


@gluon.jit
def _read_tile(buf):
    """What ``_write_tile`` wrote: group, first row, end and start of the group, first column."""
    return _read_word(buf, 0), _read_word(buf, 1), _read_word(buf, 2), _read_word(buf, 3), _read_word(buf, 4)


@gluon.jit
def _steps(group, end, start, sizes, COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr, ALIGNMENT: gl.constexpr):
    """First and last step of K. Rows of no group have none, so that their sums are zero, whatever the rows are."""
    steps = sizes[4]
    if COLUMNS:
        first = (start // ALIGNMENT + group) * (ALIGNMENT // BLOCK_K)
        return first, first + gl.cdiv(end - start, BLOCK_K)
    else:
        return 0, gl.where(group < sizes[5], steps, 0)


@gluon.jit
def _load(
    a_desc, b_desc, a_scale, b_scale, table_ptr, shared, tile_bufs, sizes, strides, pieces,
    COLUMNS: gl.constexpr, A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, ALIGNMENT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The producer warp: find this program's tiles, tell the consumers, and load all steps.

    It is ahead of the consumers, so the tensor cores need not wait for divisions and reads of the table. The first
    stage of a tile says which it is; a tile without steps takes a stage for that alone.
    """
    full = shared[5]
    empty = shared[6]
    N = sizes[1]
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        index, row, col = _piece(piece, sizes, COLUMNS, BLOCK_M, BLOCK_N, GROUP_M)
        at = table_ptr + index * FIELDS
        group, table_row, end, start = gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
        first, last = _steps(group, end, start, sizes, COLUMNS, BLOCK_K, ALIGNMENT)
        first_col = col
        if not COLUMNS:
            row = table_row
            first_col += group * N
        mbarrier.wait(empty.index(stage), phase ^ 1)
        _write_tile(tile_bufs.index(stage), group, row, end, start, col)
        if first == last:
            mbarrier.arrive(full.index(stage), count=1)
            stage, phase = next_stage(stage, phase, STAGES)
        for step in range(first, last):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            fill_stage(
                a_desc, b_desc, a_scale, b_scale, shared, strides, row, first_col, step, stage,
                A_ROWS, B_ROWS, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _read_parts(pointer, col, end, stride, PART: gl.constexpr, HALVES: gl.constexpr):
    """Load an epilogue vector for the columns of a wave, twice the same or, with HALVES, one for each half."""
    left = read_columns(pointer, col, end, stride, PART)
    right = left
    if HALVES:
        right = read_columns(pointer, col + PART, end, stride, PART)
    return left, right


@gluon.jit
def _finish(
    acc, out_desc, out_ptr, out_buf, a_scale, b_scale, bias, out_row, skipped, limit, col, N,
    SCALED: gl.constexpr, HAS_BIAS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Scales -> bias -> output dtype -> shared memory -> rows ``[skipped, limit)`` of ``out`` from ``out_row`` on."""
    ROWS: gl.constexpr = acc.shape[0]
    COLS: gl.constexpr = acc.shape[1]
    if SCALED:
        # One scale after the other: their product may over- or underflow float32 even if the result does not.
        acc *= gl.convert_layout(a_scale, gl.SliceLayout(1, layout))[:, None]
        acc *= gl.convert_layout(b_scale, gl.SliceLayout(0, layout))[None, :]
    if HAS_BIAS:
        acc += gl.convert_layout(bias.to(gl.float32), gl.SliceLayout(0, layout))[None, :]
    tma.store_wait(0)
    out_buf.store(acc.to(out_desc.dtype))
    if (limit >= ROWS) & (skipped <= 0):
        fence_async_shared()
        tma_store(out_desc, [out_row, col], out_buf)
    else:
        VECTOR: gl.constexpr = 128 // out_desc.dtype.primitive_bitwidth
        ACROSS: gl.constexpr = COLS // VECTOR if COLS // VECTOR < WARP_SIZE else WARP_SIZE
        plain: gl.constexpr = gl.BlockedLayout([1, VECTOR], [WARP_SIZE // ACROSS, ACROSS], [4, 1], [1, 0])
        rows = gl.arange(0, ROWS, gl.SliceLayout(1, plain))
        # TMA stores here, too, so N is a multiple of 16 bytes: threads can store as much at once.
        cols = gl.multiple_of(col + gl.arange(0, COLS, gl.SliceLayout(0, plain)), VECTOR)
        firsts = gl.multiple_of((out_row + rows).to(gl.int64) * N, VECTOR)
        mask = ((rows >= skipped) & (rows < limit))[:, None] & (cols < N)[None, :]
        pointers = out_ptr + firsts[:, None] + cols[None, :]
        gl.store(pointers, out_buf.load(plain), mask=gl.max_constancy(mask, [1, VECTOR]))


@gluon.jit
def _store(
    acc, out_desc, out_ptr, out_buf, a_scale, b_scales, biases, out_row, skipped, limit, col, N,
    SCALED: gl.constexpr, HAS_BIAS: gl.constexpr, HALVES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Epilogue of one wave. HALVES handles half of the columns at a time."""
    if HALVES:
        HALF: gl.constexpr = acc.shape[1] // 2
        half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
        left, right = gl.split(acc.reshape((WAVE_ROWS, 2, HALF)).permute((0, 2, 1)))
        _finish(
            gl.convert_layout(left, half), out_desc, out_ptr, out_buf, a_scale, b_scales[0], biases[0],
            out_row, skipped, limit, col, N, SCALED, HAS_BIAS, half,
        )  # fmt: skip
        _finish(
            gl.convert_layout(right, half), out_desc, out_ptr, out_buf, a_scale, b_scales[1], biases[1],
            out_row, skipped, limit, col + HALF, N, SCALED, HAS_BIAS, half,
        )  # fmt: skip
    else:
        _finish(
            acc, out_desc, out_ptr, out_buf, a_scale, b_scales[0], biases[0], out_row, skipped, limit, col, N,
            SCALED, HAS_BIAS, layout,
        )  # fmt: skip


@gluon.jit
def _multiply(
    out_desc, out_ptr, shared, tile_bufs, pointers, sizes, strides, pieces,
    GROUP: gl.constexpr, WAVES: gl.constexpr, SIDE_BY_SIDE: gl.constexpr, COLUMNS: gl.constexpr,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, HAS_BIAS: gl.constexpr, PROMOTE: gl.constexpr,
    STAGGER: gl.constexpr, TIGHT: gl.constexpr, HALVES: gl.constexpr, OVERLAP: gl.constexpr, ALIGNMENT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A consumer warp group: WAVES waves of 64 rows of each of its tiles, side by side or one below the other."""
    a_scale_ptr, b_scale_ptr, bias_ptr = pointers
    M, N, _, _, _, groups = sizes
    stride_ag, stride_bg, stride_am, _, stride_bn, _ = strides
    # An instruction takes 32 bytes of K.
    STEP: gl.constexpr = 256 // shared[0].dtype.primitive_bitwidth
    GROUP_ROWS: gl.constexpr = WAVE_ROWS if SIDE_BY_SIDE else WAVES * WAVE_ROWS
    WIDTH: gl.constexpr = BLOCK_N // 2 if SIDE_BY_SIDE else BLOCK_N
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, STEP])
    SCALED: gl.constexpr = A_ROWS == 0
    PART: gl.constexpr = WIDTH // 2 if HALVES else WIDTH
    full = shared[5]
    empty = shared[6]
    turn = shared[7]
    out_buf = shared[4].index(GROUP)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    tile_phase = gl.to_tensor(0)
    for _ in range(gl.program_id(0), pieces, gl.num_programs(0)):
        mbarrier.wait(full.index(stage), phase)
        group, row, end, start, col = _read_tile(tile_bufs.index(stage))
        first, last = _steps(group, end, start, sizes, COLUMNS, BLOCK_K, ALIGNMENT)
        if first == last:
            mbarrier.arrive(empty.index(stage), count=1)
            stage, phase = next_stage(stage, phase, STAGES)
        if COLUMNS:
            is_group = end > start
            row_start = 0
            row_end = M
            out_row = group * M + row
        else:
            is_group = group < groups
            row_start = start
            row_end = end
            out_row = row
        row += GROUP * GROUP_ROWS
        out_row += GROUP * GROUP_ROWS
        # A tile of no group, or of one without tokens, has no scales, and all its sums are zero.
        matrix = gl.where(is_group, group, 0)
        scaled_rows = gl.where(is_group, row_end, 0)
        scaled_cols = gl.where(is_group, N, 0)
        a_scale0 = None
        a_scale1 = None
        b_scales0 = (None, None)
        b_scales1 = (None, None)
        biases0 = (None, None)
        biases1 = (None, None)
        # Load before the main loop, to hide the latency.
        if SCALED:
            a_first = a_scale_ptr + matrix * stride_ag
            b_first = b_scale_ptr + matrix * stride_bg
            a_scale0 = read_rows(a_first, row, scaled_rows, stride_am, layout)
            b_scales0 = _read_parts(b_first, col, scaled_cols, stride_bn, PART, HALVES)
            if SIDE_BY_SIDE:
                b_scales1 = _read_parts(b_first, col + WIDTH, scaled_cols, stride_bn, PART, HALVES)
            elif WAVES == 2:
                a_scale1 = read_rows(a_first, row + WAVE_ROWS, scaled_rows, stride_am, layout)
        if HAS_BIAS:
            b_bias = bias_ptr + matrix * N
            biases0 = _read_parts(b_bias, col, scaled_cols, 1, PART, HALVES)
            if SIDE_BY_SIDE:
                biases1 = _read_parts(b_bias, col + WIDTH, scaled_cols, 1, PART, HALVES)
        if B_ROWS > 1:
            block_scales = (a_scale_ptr, b_scale_ptr + matrix * stride_bg, bias_ptr, bias_ptr)
        else:
            block_scales = (a_scale_ptr, b_scale_ptr, bias_ptr, bias_ptr)
        if PROMOTE and OVERLAP > 1:
            acc0, stage, phase = sum_overlapped(
                shared, block_scales, strides, row, col, first, last, stage, phase,
                GROUP, A_ROWS, B_ROWS, BLOCK_N, STAGES, OVERLAP, layout,
            )  # fmt: skip
        elif PROMOTE:
            if STAGGER and GROUP == 1:
                # Start half a step after the other group, so that the two do not promote at the same time.
                mbarrier.wait(turn, tile_phase, pred=last - first >= STAGES)
                tile_phase = tile_phase ^ gl.where(last > first, 1, 0)
            acc0, acc1, stage, phase = sum_promoted(
                shared, block_scales, strides, gl.minimum(row, M - 1), col, gl.minimum(col + WIDTH, N - 1), first, last,
                stage, phase, GROUP, WAVES, A_ROWS, B_ROWS, WIDTH, STAGES, STAGGER, TIGHT, layout,
            )  # fmt: skip
        else:
            acc0, acc1, stage, phase = sum_fast(
                shared, first, last, stage, phase, GROUP, WAVES, BLOCK_N, STAGES, layout
            )
        _store(
            acc0, out_desc, out_ptr, out_buf, a_scale0, b_scales0, biases0,
            out_row, row_start - row, row_end - row, col, N, SCALED, HAS_BIAS, HALVES, layout,
        )  # fmt: skip
        if SIDE_BY_SIDE:
            _store(
                acc1, out_desc, out_ptr, out_buf, a_scale0, b_scales1, biases1,
                out_row, row_start - row, row_end - row, col + WIDTH, N, SCALED, HAS_BIAS, HALVES, layout,
            )  # fmt: skip
        elif WAVES == 2:
            _store(
                acc1, out_desc, out_ptr, out_buf, a_scale1, b_scales0, biases0,
                out_row + WAVE_ROWS, row_start - row - WAVE_ROWS, row_end - row - WAVE_ROWS, col, N,
                SCALED, HAS_BIAS, HALVES, layout,
            )  # fmt: skip
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
    A_SCALES: gl.constexpr = BLOCK_M if BLOCK_M > SCALE_VECTOR else SCALE_VECTOR
    B_SCALES: gl.constexpr = BLOCK_N if BLOCK_N > SCALE_VECTOR else SCALE_VECTOR
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], b_desc.layout)
    out_bufs = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, WAVE_ROWS, OUT_COLS], out_desc.layout)
    tile_bufs = gl.allocate_shared_memory(gl.int32, [STAGES, TILE_WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    if STAGGER:
        mbarrier.init(turn, count=1)
    # TMA loads arrive at these barriers: the fence makes them visible to TMA.
    fence_async_shared()
    scale_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    a_scale_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, A_SCALES], scale_layout)
    b_scale_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, B_SCALES], scale_layout)
    shared = (a_bufs, b_bufs, a_scale_bufs, b_scale_bufs, out_bufs, full, empty, turn)
    pointers = (a_scale, b_scale, bias_ptr)
    strides = (stride_ag, stride_bg, stride_am, stride_ak, stride_bn, stride_bk)
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
    sizes = (M, N, tiles_m, tiles_n, gl.cdiv(K, BLOCK_K), groups)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (out_desc, out_ptr, shared, tile_bufs, pointers, sizes, strides, pieces, gl.constexpr(0),
                             WAVES, SIDE_BY_SIDE, COLUMNS, A_ROWS, B_ROWS, HAS_BIAS, PROMOTE, STAGGER, TIGHT,
                             HALVES, OVERLAP, ALIGNMENT, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
                (_load, (a_desc, b_desc, a_scale, b_scale, table_ptr, shared, tile_bufs, sizes, strides, pieces,
                         COLUMNS, A_ROWS, B_ROWS, ALIGNMENT, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
            ],
            [1],
            [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (out_desc, out_ptr, shared, tile_bufs, pointers, sizes, strides, pieces, gl.constexpr(0),
                             WAVES, SIDE_BY_SIDE, COLUMNS, A_ROWS, B_ROWS, HAS_BIAS, PROMOTE, STAGGER, TIGHT,
                             HALVES, OVERLAP, ALIGNMENT, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
                (_multiply, (out_desc, out_ptr, shared, tile_bufs, pointers, sizes, strides, pieces, gl.constexpr(1),
                             WAVES, SIDE_BY_SIDE, COLUMNS, A_ROWS, B_ROWS, HAS_BIAS, PROMOTE, STAGGER, TIGHT,
                             HALVES, OVERLAP, ALIGNMENT, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
                (_load, (a_desc, b_desc, a_scale, b_scale, table_ptr, shared, tile_bufs, sizes, strides, pieces,
                         COLUMNS, A_ROWS, B_ROWS, ALIGNMENT, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
