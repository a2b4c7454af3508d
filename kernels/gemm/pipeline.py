"""The pipeline of a warp-specialized GEMM for Hopper: stages of shared memory, each one step of K of both operands.

A producer warp fills the stages by TMA (:func:`fill_stage`). A warp group sums the steps of a tile (:func:`sum_steps`):
it waits for a stage's ``full`` barrier, multiplies, and arrives at its ``empty`` barrier. Time runs to the right,
numbers are steps of K. STAGGER with two groups of one wave each, and three stages:

    producer   | fill 0, 1, 2 |               |              | fill 3       |              | fill 4       |
    group 0    |              | multiply 0    | promote 0    | multiply 1   | promote 1    | multiply 2   |
    group 1    |              | wait for turn | multiply 0   | promote 0    | multiply 1   | promote 1    |

Group 0 arrives at ``turn`` once a tile, when its first product is there: from then on one group promotes while the
other multiplies. A stage is empty, and the producer fills it again, when both groups have multiplied it: stage 0 with
step 3 after group 1 has multiplied step 0. OVERLAP = 4, within a group of one wave:

    tensor cores  | multiply 0 | multiply 1 | multiply 2 | multiply 3 |            | multiply 4 |
    promotion     |            | promote 0  | promote 1  | promote 2  | promote 3  |            |

PINGPONG, without promotion. Each group has tiles of its own; after the last step of one it passes the ``turn``:

    group 0    | multiply tile 0 | store tile 0    | multiply tile 2 | store tile 2    |
    group 1    |                 | multiply tile 1 | store tile 1    | multiply tile 3 |
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from tritonfp8.kernels.gemm.sizes import SCALE_VECTOR as MIN_SCALES
from tritonfp8.kernels.gemm.sizes import SPECIALIZED_WAVE_ROWS
from tritonfp8.kernels.names import tma_load

WAVE_ROWS: gl.constexpr = gl.constexpr(SPECIALIZED_WAVE_ROWS)
SCALE_VECTOR: gl.constexpr = gl.constexpr(MIN_SCALES)

# Shared memory: stages of both operands and of their scales along K, a buffer a group for results, barriers.
Pipeline = namedtuple("Pipeline", "a b a_scales b_scales out full empty turn")
# Where a warp is in the pipeline: the index of its stage, and the phase of the stage's barriers.
Stage = namedtuple("Stage", "slot phase")
# Arguments of the kernel, and how many tiles and steps of K they make. Dense GEMMs have no groups.
Problem = namedtuple(
    "Problem",
    "a_scale b_scale bias residual M N tiles_m tiles_n steps groups stride_rm stride_rn stride_ag stride_bg "
    "stride_am stride_ak stride_bn stride_bk split_k",
)
# A group's rows of a tile: first row and column, and the steps of K from ``first`` to before ``last``.
Tile = namedtuple("Tile", "row col first last")
# Constants of the main loop: see ``hopper_matmul_kernel``. LAYOUT has the sums of a wave, WIDTH its columns.
Schedule = namedtuple(
    "Schedule",
    "BLOCK_M BLOCK_N BLOCK_K GROUP_M STAGES A_ROWS B_ROWS WAVES WIDTH LAYOUT PROMOTE STAGGER TIGHT OVERLAP SPLIT "
    "GROUPED COLUMNS ALIGNMENT PINGPONG",
    defaults=(False, False, False, 1, False),
)


@gluon.jit
def allocate(a_desc, b_desc, out_desc, OUT_ROWS: gl.constexpr, OUT_COLS: gl.constexpr, SCHEDULE: gl.constexpr):
    """Shared memory of a program; its barriers are not initialized. ``OUT_ROWS x OUT_COLS`` are stored at once."""
    STAGES: gl.constexpr = SCHEDULE.STAGES
    BLOCK_M: gl.constexpr = SCHEDULE.BLOCK_M
    BLOCK_N: gl.constexpr = SCHEDULE.BLOCK_N
    GROUPS: gl.constexpr = 1 if BLOCK_M == WAVE_ROWS else 2
    A_SCALES: gl.constexpr = BLOCK_M if BLOCK_M > SCALE_VECTOR else SCALE_VECTOR
    B_SCALES: gl.constexpr = BLOCK_N if BLOCK_N > SCALE_VECTOR else SCALE_VECTOR
    a = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_M, SCHEDULE.BLOCK_K], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_N, SCHEDULE.BLOCK_K], b_desc.layout)
    out = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, OUT_ROWS, OUT_COLS], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    # TMA loads scales along K with the operands; other scales are read from global memory.
    scale_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    a_scales = gl.allocate_shared_memory(gl.float32, [STAGES, A_SCALES], scale_layout)
    b_scales = gl.allocate_shared_memory(gl.float32, [STAGES, B_SCALES], scale_layout)
    return Pipeline(a, b, a_scales, b_scales, out, full, empty, turn)


@gluon.jit
def next_stage(stage, STAGES: gl.constexpr):
    """The stage after ``stage``."""
    wrapped = stage.slot == STAGES - 1
    return Stage(gl.where(wrapped, 0, stage.slot + 1), gl.where(wrapped, stage.phase ^ 1, stage.phase))


@gluon.jit
def _stage_before(stage, STAGES: gl.constexpr):
    return gl.where(stage.slot == 0, STAGES - 1, stage.slot - 1)


@gluon.jit
def fill_stage(a_desc, b_desc, problem, ring, row, col, step, stage, SCHEDULE: gl.constexpr):
    """Start the TMA loads of one step into the empty stage of this index."""
    A_SCALES: gl.constexpr = ring.a_scales.shape[1] if SCHEDULE.A_ROWS == 1 else 0
    B_SCALES: gl.constexpr = ring.b_scales.shape[1] if SCHEDULE.B_ROWS == 1 else 0
    ready = ring.full.index(stage)
    K: gl.constexpr = SCHEDULE.BLOCK_K
    ITEM_BYTES: gl.constexpr = a_desc.dtype.primitive_bitwidth // 8
    mbarrier.expect(ready, (SCHEDULE.BLOCK_M + SCHEDULE.BLOCK_N) * K * ITEM_BYTES + 4 * (A_SCALES + B_SCALES))
    tma_load(a_desc, [row, step * K], ready, ring.a.index(stage))
    tma_load(b_desc, [col, step * K], ready, ring.b.index(stage))
    if SCHEDULE.A_ROWS == 1:
        tma_load(problem.a_scale, [row + step * problem.stride_ak], ready, ring.a_scales.index(stage))
    if SCHEDULE.B_ROWS == 1:
        tma_load(problem.b_scale, [col + step * problem.stride_bk], ready, ring.b_scales.index(stage))


@gluon.jit
def _start(a_buf, b_buf, acc, use_acc, ROWS: gl.constexpr, COLUMNS: gl.constexpr = 0):
    """Start the wgmma of one wave over one stage, added to ``acc`` if use_acc.

    The wave is the ROWS-th 64 rows of ``a`` with the COLUMNS-th part of ``b``, as wide as ``acc``.
    """
    WIDTH: gl.constexpr = acc.shape[1]
    rows = a_buf.slice(ROWS * WAVE_ROWS, WAVE_ROWS)
    columns = b_buf.slice(COLUMNS * WIDTH, WIDTH)
    return warpgroup_mma(rows, columns.permute((1, 0)), acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _promote(acc, part, a_scale, b_scale, SCHEDULE: gl.constexpr):
    """Add the result of one step to ``acc``, scaled; if A_ROWS is 0 the epilogue applies the scales."""
    if SCHEDULE.A_ROWS == 0:
        return acc + part
    elif SCHEDULE.A_ROWS == 1 and SCHEDULE.B_ROWS == 1:
        return acc + part * b_scale[None, :] * a_scale[:, None]
    elif SCHEDULE.A_ROWS == 1:
        return acc + part * (a_scale * b_scale)[:, None]
    elif SCHEDULE.B_ROWS == 1:
        return acc + part * (a_scale * b_scale)[None, :]
    else:
        return acc + part * (a_scale * b_scale)


@gluon.jit
def _read_scale(
    pointer, buf, row, step, stride_row, stride_step,
    FIRST: gl.constexpr, SIZE: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Scales of rows [FIRST, FIRST + SIZE) of the tile at ``row``: a vector from shared memory, or one shared scale."""
    if ROWS == 0:
        return 1.0
    elif ROWS == 1:
        return buf.slice(FIRST, SIZE).load(layout)
    else:
        return gl.load(pointer + (row // ROWS) * stride_row + step * stride_step)


@gluon.jit
def _row_scales(problem, buf, row, step, WAVE: gl.constexpr, SCHEDULE: gl.constexpr):
    return _read_scale(
        problem.a_scale, buf, row, step, problem.stride_am, problem.stride_ak,
        WAVE * WAVE_ROWS, WAVE_ROWS, SCHEDULE.A_ROWS, gl.SliceLayout(1, SCHEDULE.LAYOUT),
    )  # fmt: skip


@gluon.jit
def _column_scales(problem, b_scale, buf, col, step, FIRST: gl.constexpr, SCHEDULE: gl.constexpr):
    return _read_scale(
        b_scale, buf, col, step, problem.stride_bn, problem.stride_bk,
        FIRST, SCHEDULE.WIDTH, SCHEDULE.B_ROWS, gl.SliceLayout(0, SCHEDULE.LAYOUT),
    )  # fmt: skip


@gluon.jit
def _end_step(ring, token, stage, has_next, STAGES: gl.constexpr):
    """Wait for the last wgmma of a step and free its stage: its product, and the next stage.

    The wait for the next step's data comes first, so that the tensor cores idle for less.
    """
    used = stage.slot
    stage = next_stage(stage, STAGES)
    mbarrier.wait(ring.full.index(stage.slot), stage.phase, pred=has_next)
    product = warpgroup_mma_wait(0, deps=[token])
    mbarrier.arrive(ring.empty.index(used), count=1)
    return product, stage


@gluon.jit
def _sum_promoted(ring, problem, b_pointer, tile, stage, GROUP: gl.constexpr, SCHEDULE: gl.constexpr):
    """Sum the steps of a tile, each promoted to float32.

    Where a stage holds more columns than a wave, the second wave has the same rows and the columns beside; otherwise it
    has the rows below. Scales of blocks are read inside the matrices only.
    """
    row = gl.minimum(tile.row, problem.M - 1)
    second_col = gl.minimum(tile.col + SCHEDULE.WIDTH, problem.N - 1)
    SIDE_BY_SIDE: gl.constexpr = ring.b.shape[1] > SCHEDULE.WIDTH
    FIRST: gl.constexpr = GROUP if SIDE_BY_SIDE else GROUP * SCHEDULE.WAVES
    SECOND: gl.constexpr = FIRST if SIDE_BY_SIDE else FIRST + 1
    SECOND_COLUMNS: gl.constexpr = 1 if SIDE_BY_SIDE else 0
    zero = gl.zeros((WAVE_ROWS, SCHEDULE.WIDTH), gl.float32, SCHEDULE.LAYOUT)
    acc0 = zero
    acc1 = zero
    mbarrier.wait(ring.full.index(stage.slot), stage.phase, pred=tile.last > tile.first)
    for step in range(tile.first, tile.last):
        a_buf = ring.a.index(stage.slot)
        b_buf = ring.b.index(stage.slot)
        a_scales = ring.a_scales.index(stage.slot)
        b_scales = ring.b_scales.index(stage.slot)
        token = _start(a_buf, b_buf, zero, False, FIRST)
        # Load while the tensor cores work, to hide the latency.
        a_scale = _row_scales(problem, a_scales, row, step, FIRST, SCHEDULE)
        b_scale = _column_scales(problem, b_pointer, b_scales, tile.col, step, 0, SCHEDULE)
        if SCHEDULE.WAVES == 2:
            product = warpgroup_mma_wait(0, deps=[token])
            if SCHEDULE.STAGGER and GROUP == 0:  # noqa: SIM102 - one is known when compiling
                if step == tile.first:
                    mbarrier.arrive(ring.turn, count=1)
            acc0 = _promote(acc0, product, a_scale, b_scale, SCHEDULE)
            if SCHEDULE.TIGHT:
                # Promote before the next wgmma overwrites the registers of ``product``. ``last < first`` is never true,
                # but ptxas should not know: in dense GEMMs it would take other registers for this wgmma, and spill.
                acc0 = warpgroup_mma_wait(0, deps=[acc0])
                token = _start(a_buf, b_buf, product, tile.last < tile.first, SECOND, SECOND_COLUMNS)
            else:
                token = _start(a_buf, b_buf, zero, False, SECOND, SECOND_COLUMNS)
            if SIDE_BY_SIDE:
                b_scale = _column_scales(problem, b_pointer, b_scales, second_col, step, SCHEDULE.WIDTH, SCHEDULE)
            elif SCHEDULE.A_ROWS == 1:
                a_scale = _row_scales(problem, a_scales, row, step, SECOND, SCHEDULE)
        product, stage = _end_step(ring, token, stage, step + 1 < tile.last, SCHEDULE.STAGES)
        if SCHEDULE.WAVES == 2:
            acc1 = _promote(acc1, product, a_scale, b_scale, SCHEDULE)
        else:
            if SCHEDULE.STAGGER and GROUP == 0:  # noqa: SIM102 - one is known when compiling
                if step == tile.first:
                    mbarrier.arrive(ring.turn, count=1)
            acc0 = _promote(acc0, product, a_scale, b_scale, SCHEDULE)
    return acc0, acc1, stage


@gluon.jit
def _start_step(ring, problem, b_pointer, tile, step, stage, GROUP: gl.constexpr, SCHEDULE: gl.constexpr):
    """Start the only wave of a step whose data is there, and load its scales."""
    zero = gl.zeros((WAVE_ROWS, SCHEDULE.WIDTH), gl.float32, SCHEDULE.LAYOUT)
    token = _start(ring.a.index(stage.slot), ring.b.index(stage.slot), zero, False, GROUP)
    a_scale = _row_scales(problem, ring.a_scales.index(stage.slot), tile.row, step, GROUP, SCHEDULE)
    b_scale = _column_scales(problem, b_pointer, ring.b_scales.index(stage.slot), tile.col, step, 0, SCHEDULE)
    return token, a_scale, b_scale


@gluon.jit
def _sum_overlapped(ring, problem, b_pointer, tile, stage, GROUP: gl.constexpr, SCHEDULE: gl.constexpr):
    """:func:`_sum_promoted` with one wave; each step starts before the last one is promoted, OVERLAP steps in a row.

    No wgmma may be in flight across an iteration: ptxas would then wait for each one.
    """
    OVERLAP: gl.constexpr = SCHEDULE.OVERLAP
    acc = gl.zeros((WAVE_ROWS, SCHEDULE.WIDTH), gl.float32, SCHEDULE.LAYOUT)
    turns = (tile.last - tile.first) // OVERLAP
    mbarrier.wait(ring.full.index(stage.slot), stage.phase, pred=tile.last > tile.first)
    for turn in range(turns):
        step = tile.first + turn * OVERLAP
        token, a_scale, b_scale = _start_step(ring, problem, b_pointer, tile, step, stage, GROUP, SCHEDULE)
        for i in gl.static_range(1, OVERLAP):
            used = stage.slot
            stage = next_stage(stage, SCHEDULE.STAGES)
            mbarrier.wait(ring.full.index(stage.slot), stage.phase)
            token_next, a_next, b_next = _start_step(ring, problem, b_pointer, tile, step + i, stage, GROUP, SCHEDULE)
            product = warpgroup_mma_wait(1, deps=[token])
            mbarrier.arrive(ring.empty.index(used), count=1)
            # The wait stops the compiler from moving the promotion behind the next start.
            acc = warpgroup_mma_wait(1, deps=[_promote(acc, product, a_scale, b_scale, SCHEDULE)])
            token = token_next
            a_scale = a_next
            b_scale = b_next
        product, stage = _end_step(ring, token, stage, step + OVERLAP < tile.last, SCHEDULE.STAGES)
        acc = _promote(acc, product, a_scale, b_scale, SCHEDULE)
    for step in range(tile.first + turns * OVERLAP, tile.last):
        token, a_scale, b_scale = _start_step(ring, problem, b_pointer, tile, step, stage, GROUP, SCHEDULE)
        product, stage = _end_step(ring, token, stage, step + 1 < tile.last, SCHEDULE.STAGES)
        acc = _promote(acc, product, a_scale, b_scale, SCHEDULE)
    return acc, acc, stage


@gluon.jit
def _sum_fast(ring, tile, stage, GROUP: gl.constexpr, SCHEDULE: gl.constexpr):
    """:func:`_sum_promoted` without promotion: the tensor core's accumulator sums all steps, and one is in flight."""
    FIRST: gl.constexpr = GROUP * SCHEDULE.WAVES
    STAGES: gl.constexpr = SCHEDULE.STAGES
    acc0 = gl.zeros((WAVE_ROWS, SCHEDULE.WIDTH), gl.float32, SCHEDULE.LAYOUT)
    acc1 = acc0
    for step in range(tile.first, tile.last):
        mbarrier.wait(ring.full.index(stage.slot), stage.phase)
        a_buf = ring.a.index(stage.slot)
        b_buf = ring.b.index(stage.slot)
        acc0 = _start(a_buf, b_buf, acc0, True, FIRST)
        if SCHEDULE.WAVES == 2:
            acc1 = _start(a_buf, b_buf, acc1, True, FIRST + 1)
            acc0, acc1 = warpgroup_mma_wait(2, deps=[acc0, acc1])
        else:
            acc0 = warpgroup_mma_wait(1, deps=[acc0])
        # Recomputed, not kept from the last step: if two names have the same value before a loop, Triton takes them for
        # one inside it.
        mbarrier.arrive(ring.empty.index(_stage_before(stage, STAGES)), count=1, pred=step > tile.first)
        stage = next_stage(stage, STAGES)
    if SCHEDULE.PINGPONG:
        mbarrier.arrive(ring.turn, count=1)
    if SCHEDULE.WAVES == 2:
        acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
    else:
        acc0 = warpgroup_mma_wait(0, deps=[acc0])
    mbarrier.arrive(ring.empty.index(_stage_before(stage, STAGES)), count=1, pred=tile.last > tile.first)
    return acc0, acc1, stage


@gluon.jit
def sum_steps(ring, problem, b_pointer, tile, stage, turn, GROUP: gl.constexpr, SCHEDULE: gl.constexpr):
    """Sum the steps of a tile over K for this group's rows.

    Args:
        b_pointer: the scales of ``b``, of the tile's group.
        turn: the phase of the barrier at which a group waits, so that both do not promote at the same time.

    Returns:
        The sums of the first and of the second wave ``[64, WIDTH]``, float32; the stage after the tile; ``turn``.
    """
    if not SCHEDULE.PROMOTE:
        acc0, acc1, stage = _sum_fast(ring, tile, stage, GROUP, SCHEDULE)
    elif SCHEDULE.OVERLAP > 1:
        acc0, acc1, stage = _sum_overlapped(ring, problem, b_pointer, tile, stage, GROUP, SCHEDULE)
    else:
        if SCHEDULE.STAGGER and GROUP == 1:
            # Start half a step after the other group, unless the tile is short.
            if SCHEDULE.GROUPED:
                mbarrier.wait(ring.turn, turn, pred=tile.last - tile.first >= SCHEDULE.STAGES)
                turn = turn ^ gl.where(tile.last > tile.first, 1, 0)
            else:
                mbarrier.wait(ring.turn, turn, pred=problem.steps >= SCHEDULE.STAGES)
                turn = turn ^ 1
        acc0, acc1, stage = _sum_promoted(ring, problem, b_pointer, tile, stage, GROUP, SCHEDULE)
    return acc0, acc1, stage, turn
