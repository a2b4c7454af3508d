"""The pipeline of a warp-specialized GEMM for Hopper: stages of shared memory, each one step of K of both operands.

A producer warp fills the stages by TMA (:func:`fill_stage`). A warp group sums the steps of a tile (``sum_*``): it
waits for a stage's ``full`` barrier, multiplies, and arrives at its ``empty`` barrier.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from tritonfp8.kernels.matmul.sizes import SPECIALIZED_WAVE_ROWS
from tritonfp8.kernels.triton_names import tma_load

WAVE_ROWS: gl.constexpr = gl.constexpr(SPECIALIZED_WAVE_ROWS)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage after ``stage``, and the phase of its barriers."""
    wrapped = stage == STAGES - 1
    return gl.where(wrapped, 0, stage + 1), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def _stage_before(stage, STAGES: gl.constexpr):
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def fill_stage(
    a_desc, b_desc, a_scale, b_scale, shared, strides, row, col, step, stage,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """Start the TMA loads of one step into an empty stage."""
    a_bufs, b_bufs, a_scale_bufs, b_scale_bufs, _, full, _, _ = shared
    _, _, _, stride_ak, _, stride_bk = strides
    A_SCALES: gl.constexpr = a_scale_bufs.shape[1] if A_ROWS == 1 else 0
    B_SCALES: gl.constexpr = b_scale_bufs.shape[1] if B_ROWS == 1 else 0
    ready = full.index(stage)
    ITEM_BYTES: gl.constexpr = a_desc.dtype.primitive_bitwidth // 8
    mbarrier.expect(ready, (BLOCK_M + BLOCK_N) * BLOCK_K * ITEM_BYTES + 4 * (A_SCALES + B_SCALES))
    tma_load(a_desc, [row, step * BLOCK_K], ready, a_bufs.index(stage))
    tma_load(b_desc, [col, step * BLOCK_K], ready, b_bufs.index(stage))
    if A_ROWS == 1:
        tma_load(a_scale, [row + step * stride_ak], ready, a_scale_bufs.index(stage))
    if B_ROWS == 1:
        tma_load(b_scale, [col + step * stride_bk], ready, b_scale_bufs.index(stage))


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
def _promote(acc, part, a_scale, b_scale, A_ROWS: gl.constexpr, B_ROWS: gl.constexpr):
    """Add the result of one step to ``acc``, scaled; if A_ROWS is 0 the epilogue applies the scales."""
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
    """Scales of rows [FIRST, FIRST + SIZE) of the tile at ``row``: a vector from shared memory, or one shared scale."""
    if ROWS == 0:
        return 1.0
    elif ROWS == 1:
        return buf.slice(FIRST, SIZE).load(layout)
    else:
        return gl.load(pointer + (row // ROWS) * stride_row + step * stride_step)


@gluon.jit
def _end_step(shared, token, stage, phase, has_next, STAGES: gl.constexpr):
    """Wait for the last wgmma of a step and free its stage: its product, and the next stage.

    The wait for the next step's data comes first, so that the tensor cores idle for less.
    """
    full = shared[5]
    empty = shared[6]
    used = stage
    stage, phase = next_stage(stage, phase, STAGES)
    mbarrier.wait(full.index(stage), phase, pred=has_next)
    product = warpgroup_mma_wait(0, deps=[token])
    mbarrier.arrive(empty.index(used), count=1)
    return product, stage, phase


@gluon.jit
def sum_promoted(
    shared, pointers, strides, row, col, second_col, first, last, stage, phase,
    GROUP: gl.constexpr, WAVES: gl.constexpr, A_ROWS: gl.constexpr, B_ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, STAGGER: gl.constexpr, TIGHT: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Sum steps ``[first, last)`` for this group's rows of a tile; each step is promoted to float32.

    BLOCK_N are the columns of a wave. Where a stage holds more of them, the second wave has the same rows and the
    columns beside; otherwise it has the rows below. ``row``, ``col`` and, of the columns beside, ``second_col`` say
    which scales of blocks to read, so they must lie inside the matrices.
    """
    a_bufs, b_bufs, a_scale_bufs, b_scale_bufs, _, full, _, turn = shared
    a_scale_ptr, b_scale_ptr, _, _ = pointers
    _, _, stride_am, stride_ak, stride_bn, stride_bk = strides
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    col_layout: gl.constexpr = gl.SliceLayout(0, layout)
    SIDE_BY_SIDE: gl.constexpr = b_bufs.shape[1] > BLOCK_N
    FIRST: gl.constexpr = GROUP if SIDE_BY_SIDE else GROUP * WAVES
    SECOND: gl.constexpr = FIRST if SIDE_BY_SIDE else FIRST + 1
    SECOND_COLUMNS: gl.constexpr = 1 if SIDE_BY_SIDE else 0
    zero = gl.zeros((WAVE_ROWS, BLOCK_N), gl.float32, layout)
    acc0 = zero
    acc1 = zero
    mbarrier.wait(full.index(stage), phase, pred=last > first)
    for step in range(first, last):
        a_buf = a_bufs.index(stage)
        b_buf = b_bufs.index(stage)
        a_scales = a_scale_bufs.index(stage)
        b_scales = b_scale_bufs.index(stage)
        token = _start(a_buf, b_buf, zero, False, FIRST)
        # Load while the tensor cores work, to hide the latency.
        a_scale = _read_scale(
            a_scale_ptr, a_scales, row, step, stride_am, stride_ak, FIRST * WAVE_ROWS, WAVE_ROWS, A_ROWS, row_layout
        )
        b_scale = _read_scale(b_scale_ptr, b_scales, col, step, stride_bn, stride_bk, 0, BLOCK_N, B_ROWS, col_layout)
        if WAVES == 2:
            product = warpgroup_mma_wait(0, deps=[token])
            if STAGGER and GROUP == 0:  # noqa: SIM102 - one is known when compiling
                if step == first:
                    mbarrier.arrive(turn, count=1)
            acc0 = _promote(acc0, product, a_scale, b_scale, A_ROWS, B_ROWS)
            if TIGHT:
                # Promote before the next wgmma overwrites the registers of ``product``. ``last < first`` is never true,
                # but ptxas should not know: in dense GEMMs it would take other registers for this wgmma, and spill.
                acc0 = warpgroup_mma_wait(0, deps=[acc0])
                token = _start(a_buf, b_buf, product, last < first, SECOND, SECOND_COLUMNS)
            else:
                token = _start(a_buf, b_buf, zero, False, SECOND, SECOND_COLUMNS)
            if SIDE_BY_SIDE:
                b_scale = _read_scale(
                    b_scale_ptr, b_scales, second_col, step, stride_bn, stride_bk, BLOCK_N, BLOCK_N, B_ROWS, col_layout
                )  # fmt: skip
            elif A_ROWS == 1:
                a_scale = a_scales.slice(SECOND * WAVE_ROWS, WAVE_ROWS).load(row_layout)
        product, stage, phase = _end_step(shared, token, stage, phase, step + 1 < last, STAGES)
        if WAVES == 2:
            acc1 = _promote(acc1, product, a_scale, b_scale, A_ROWS, B_ROWS)
        else:
            if STAGGER and GROUP == 0:  # noqa: SIM102 - one is known when compiling
                if step == first:
                    mbarrier.arrive(turn, count=1)
            acc0 = _promote(acc0, product, a_scale, b_scale, A_ROWS, B_ROWS)
    return acc0, acc1, stage, phase


@gluon.jit
def _start_step(
    shared, pointers, strides, row, col, step, stage, GROUP: gl.constexpr, A_ROWS: gl.constexpr,
    B_ROWS: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Start the only wave of a step whose data is there, and load its scales."""
    a_bufs, b_bufs, a_scale_bufs, b_scale_bufs, _, _, _, _ = shared
    a_scale_ptr, b_scale_ptr, _, _ = pointers
    _, _, stride_am, stride_ak, stride_bn, stride_bk = strides
    zero = gl.zeros((WAVE_ROWS, BLOCK_N), gl.float32, layout)
    token = _start(a_bufs.index(stage), b_bufs.index(stage), zero, False, GROUP)
    a_scale = _read_scale(
        a_scale_ptr, a_scale_bufs.index(stage), row, step, stride_am, stride_ak,
        GROUP * WAVE_ROWS, WAVE_ROWS, A_ROWS, gl.SliceLayout(1, layout),
    )  # fmt: skip
    b_scale = _read_scale(
        b_scale_ptr, b_scale_bufs.index(stage), col, step, stride_bn, stride_bk,
        0, BLOCK_N, B_ROWS, gl.SliceLayout(0, layout),
    )  # fmt: skip
    return token, a_scale, b_scale


@gluon.jit
def sum_overlapped(
    shared, pointers, strides, row, col, first, last, stage, phase, GROUP: gl.constexpr, A_ROWS: gl.constexpr,
    B_ROWS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """:func:`sum_promoted` with one wave; each step starts before the last one is promoted, OVERLAP steps in a row.

    No wgmma may be in flight across an iteration: ptxas would then wait for each one.
    """
    full = shared[5]
    empty = shared[6]
    acc = gl.zeros((WAVE_ROWS, BLOCK_N), gl.float32, layout)
    turns = (last - first) // OVERLAP
    mbarrier.wait(full.index(stage), phase, pred=last > first)
    for turn in range(turns):
        step = first + turn * OVERLAP
        token, a_scale, b_scale = _start_step(
            shared, pointers, strides, row, col, step, stage, GROUP, A_ROWS, B_ROWS, BLOCK_N, layout
        )
        for i in gl.static_range(1, OVERLAP):
            used = stage
            stage, phase = next_stage(stage, phase, STAGES)
            mbarrier.wait(full.index(stage), phase)
            token_next, a_next, b_next = _start_step(
                shared, pointers, strides, row, col, step + i, stage, GROUP, A_ROWS, B_ROWS, BLOCK_N, layout
            )
            product = warpgroup_mma_wait(1, deps=[token])
            mbarrier.arrive(empty.index(used), count=1)
            # The wait stops the compiler from moving the promotion behind the next start.
            acc = warpgroup_mma_wait(1, deps=[_promote(acc, product, a_scale, b_scale, A_ROWS, B_ROWS)])
            token = token_next
            a_scale = a_next
            b_scale = b_next
        product, stage, phase = _end_step(shared, token, stage, phase, step + OVERLAP < last, STAGES)
        acc = _promote(acc, product, a_scale, b_scale, A_ROWS, B_ROWS)
    for step in range(first + turns * OVERLAP, last):
        token, a_scale, b_scale = _start_step(
            shared, pointers, strides, row, col, step, stage, GROUP, A_ROWS, B_ROWS, BLOCK_N, layout
        )
        product, stage, phase = _end_step(shared, token, stage, phase, step + 1 < last, STAGES)
        acc = _promote(acc, product, a_scale, b_scale, A_ROWS, B_ROWS)
    return acc, stage, phase


@gluon.jit
def sum_fast(
    shared, first, last, stage, phase,
    GROUP: gl.constexpr, WAVES: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """:func:`sum_promoted` without promotion: the tensor core's accumulator sums all steps, and one is in flight."""
    a_bufs, b_bufs, _, _, _, full, empty, _ = shared
    FIRST: gl.constexpr = GROUP * WAVES
    acc0 = gl.zeros((WAVE_ROWS, BLOCK_N), gl.float32, layout)
    acc1 = acc0
    for step in range(first, last):
        mbarrier.wait(full.index(stage), phase)
        a_buf = a_bufs.index(stage)
        b_buf = b_bufs.index(stage)
        acc0 = _start(a_buf, b_buf, acc0, True, FIRST)
        if WAVES == 2:
            acc1 = _start(a_buf, b_buf, acc1, True, FIRST + 1)
            acc0, acc1 = warpgroup_mma_wait(2, deps=[acc0, acc1])
        else:
            acc0 = warpgroup_mma_wait(1, deps=[acc0])
        # Recomputed, not kept from the last step: if two names have the same value before a loop, Triton takes them for
        # one inside it.
        mbarrier.arrive(empty.index(_stage_before(stage, STAGES)), count=1, pred=step > first)
        stage, phase = next_stage(stage, phase, STAGES)
    if WAVES == 2:
        acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
    else:
        acc0 = warpgroup_mma_wait(0, deps=[acc0])
    mbarrier.arrive(empty.index(_stage_before(stage, STAGES)), count=1, pred=last > first)
    return acc0, acc1, stage, phase
