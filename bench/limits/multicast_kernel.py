"""A GEMM whose programs are clusters of blocks that share ``b``: one TMA load brings it to every block of a cluster.

The structure is ``hopper_matmul_kernel``: a producer warp, two consumer groups of 64 rows in each block, fast
accumulation or promotion. With one block a cluster it is the same kernel without multicast. Needs Triton 3.8 or later.

Before the first block loads ``b``, the consumers of all blocks must have freed the stage. MULTICAST says who arrives at
its ``shared`` barrier: "direct", each consumer; "relay", each producer, after its own consumers.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tritonfp8.kernels.gemm.hopper_dense import tile_origin
from tritonfp8.kernels.gemm.pipeline import WAVE_ROWS, Stage, next_stage

GROUPS: gl.constexpr = gl.constexpr(2)
# Shared memory. Blocks have their own ``full`` and ``empty``; at ``shared`` of the first block all blocks arrive.
Ring = namedtuple("Ring", "a b out full empty shared")
Problem = namedtuple("Problem", "a_scale b_scale tiles_m tiles_n steps")
# ROWS of a group in all blocks. Layouts: SUMS of a tile, HALF of its columns, COLUMNS of the scales of ``b``.
Shape = namedtuple("Shape", "ROWS BLOCK_N BLOCK_K GROUP_M STAGES OVERLAP CLUSTER MULTICAST SUMS HALF COLUMNS")


@gluon.jit
def _origin(tile, problem, SHAPE: gl.constexpr):
    return tile_origin(
        tile, problem.tiles_m, problem.tiles_n, GROUPS * SHAPE.ROWS, SHAPE.BLOCK_N, SHAPE.GROUP_M // SHAPE.CLUSTER
    )


@gluon.jit
def _load(a_desc, b_desc, ring, problem, SHAPE: gl.constexpr):
    stage = Stage(gl.to_tensor(0), gl.to_tensor(0))
    for tile in range(gl.program_id(0), problem.tiles_m * problem.tiles_n, gl.num_programs(0)):
        row, col = _origin(tile, problem, SHAPE)
        for step in range(problem.steps):
            slot = stage.slot
            mbarrier.wait(ring.empty.index(slot), stage.phase ^ 1)
            # Only the first block, which loads ``b`` for all, waits at ``shared``.
            if SHAPE.MULTICAST == "relay":
                mbarrier.arrive(ring.shared.index(slot), count=1)
                mbarrier.wait(ring.shared.index(slot), stage.phase)
            elif SHAPE.MULTICAST == "direct":
                mbarrier.wait(ring.shared.index(slot), stage.phase ^ 1)
            full = ring.full.index(slot)
            mbarrier.expect(full, (GROUPS * WAVE_ROWS + SHAPE.BLOCK_N) * SHAPE.BLOCK_K)
            for group in gl.static_range(GROUPS):
                a = ring.a.index(slot * GROUPS + group)
                tma.async_load(a_desc, [row + group * SHAPE.ROWS, step * SHAPE.BLOCK_K], full, a)
            b = ring.b.index(slot)
            tma.async_load(b_desc, [col, step * SHAPE.BLOCK_K], full, b, multicast=SHAPE.MULTICAST is not None)
            stage = next_stage(stage, SHAPE.STAGES)


@gluon.jit
def _start(ring, slot, acc, use_acc, GROUP: gl.constexpr):
    b = ring.b.index(slot).permute((1, 0))
    return warpgroup_mma(ring.a.index(slot * GROUPS + GROUP), b, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _free(ring, slot, pred, SHAPE: gl.constexpr):
    mbarrier.arrive(ring.empty.index(slot), count=1, pred=pred)
    if SHAPE.MULTICAST == "direct":
        mbarrier.arrive(ring.shared.index(slot), count=1, pred=pred)


@gluon.jit
def _sum_fast(ring, problem, stage, GROUP: gl.constexpr, SHAPE: gl.constexpr):
    acc = gl.zeros((SHAPE.ROWS, SHAPE.BLOCK_N), gl.float32, SHAPE.SUMS)
    for step in range(problem.steps):
        mbarrier.wait(ring.full.index(stage.slot), stage.phase)
        acc = _start(ring, stage.slot, acc, True, GROUP)
        acc = warpgroup_mma_wait(1, deps=[acc])
        _free(ring, gl.where(stage.slot == 0, SHAPE.STAGES - 1, stage.slot - 1), step > 0, SHAPE)
        stage = next_stage(stage, SHAPE.STAGES)
    acc = warpgroup_mma_wait(0, deps=[acc])
    _free(ring, gl.where(stage.slot == 0, SHAPE.STAGES - 1, stage.slot - 1), True, SHAPE)
    return acc, stage


@gluon.jit
def _sum_promoted(ring, problem, stage, GROUP: gl.constexpr, SHAPE: gl.constexpr):
    """OVERLAP steps in a row start before the one before is promoted; their number divides the steps."""
    zero = gl.zeros((SHAPE.ROWS, SHAPE.BLOCK_N), gl.float32, SHAPE.SUMS)
    acc = zero
    mbarrier.wait(ring.full.index(stage.slot), stage.phase)
    for turn in range(problem.steps // SHAPE.OVERLAP):
        token = _start(ring, stage.slot, zero, False, GROUP)
        for _ in gl.static_range(1, SHAPE.OVERLAP):
            used = stage.slot
            stage = next_stage(stage, SHAPE.STAGES)
            mbarrier.wait(ring.full.index(stage.slot), stage.phase)
            token_next = _start(ring, stage.slot, zero, False, GROUP)
            product = warpgroup_mma_wait(1, deps=[token])
            _free(ring, used, True, SHAPE)
            acc = warpgroup_mma_wait(1, deps=[acc + product])
            token = token_next
        used = stage.slot
        stage = next_stage(stage, SHAPE.STAGES)
        mbarrier.wait(ring.full.index(stage.slot), stage.phase, pred=(turn + 1) * SHAPE.OVERLAP < problem.steps)
        product = warpgroup_mma_wait(0, deps=[token])
        _free(ring, used, True, SHAPE)
        acc = acc + product
    return acc, stage


@gluon.jit
def _store(half, out_desc, out, a_scale, b_scale, row, col, SHAPE: gl.constexpr):
    half = gl.convert_layout(half, SHAPE.HALF)
    half *= gl.convert_layout(a_scale, gl.SliceLayout(1, SHAPE.HALF))[:, None]
    half *= gl.convert_layout(b_scale, gl.SliceLayout(0, SHAPE.HALF))[None, :]
    tma.store_wait(0)
    out.store(half.to(out_desc.dtype))
    fence_async_shared()
    tma.async_store(out_desc, [row, col], out)


@gluon.jit
def _multiply(out_desc, ring, problem, GROUP: gl.constexpr, SHAPE: gl.constexpr):
    stage = Stage(gl.to_tensor(0), gl.to_tensor(0))
    HALF: gl.constexpr = SHAPE.BLOCK_N // 2
    out = ring.out.index(GROUP)
    for tile in range(gl.program_id(0), problem.tiles_m * problem.tiles_n, gl.num_programs(0)):
        row, col = _origin(tile, problem, SHAPE)
        row += GROUP * SHAPE.ROWS
        a_scale = gl.load(problem.a_scale + row + gl.arange(0, SHAPE.ROWS, gl.SliceLayout(1, SHAPE.SUMS)))
        columns = gl.arange(0, HALF, SHAPE.COLUMNS)
        b_left = gl.load(problem.b_scale + col + columns)
        b_right = gl.load(problem.b_scale + (col + HALF) + columns)
        if SHAPE.OVERLAP:
            acc, stage = _sum_promoted(ring, problem, stage, GROUP, SHAPE)
        else:
            acc, stage = _sum_fast(ring, problem, stage, GROUP, SHAPE)
        left, right = gl.split(acc.reshape((SHAPE.ROWS, 2, HALF)).permute((0, 2, 1)))
        _store(left, out_desc, out, a_scale, b_left, row, col, SHAPE)
        _store(right, out_desc, out, a_scale, b_right, row, col + HALF, SHAPE)
    tma.store_wait(0)


@gluon.jit
def multicast_matmul_kernel(
    a_desc, b_desc, out_desc, a_scale, b_scale, M, N, K,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
    MULTICAST: gl.constexpr,
):  # fmt: skip
    """``out [M, N] = (a [M, K] @ b [N, K].T) * a_scale[:, None] * b_scale``, of multiples of the tile.

    OVERLAP promotes the sum to float32 every BLOCK_K of K, so many steps in a row; 0 accumulates fast. The blocks of
    the descriptors are ``[64 * CLUSTER, BLOCK_K]``, ``[BLOCK_N, BLOCK_K]`` and ``[64 * CLUSTER, BLOCK_N / 2]``.
    """
    CLUSTER: gl.constexpr = gl.num_ctas()
    rows: gl.constexpr = [[1, 0]] if CLUSTER > 1 else []
    own: gl.constexpr = mbarrier.MBarrierLayout([[1]] if CLUSTER > 1 else [])
    together: gl.constexpr = mbarrier.MBarrierLayout([[0]] if CLUSTER > 1 else [])
    SHAPE: gl.constexpr = Shape(
        WAVE_ROWS * CLUSTER, BLOCK_N, BLOCK_K, GROUP_M, STAGES, OVERLAP, CLUSTER, MULTICAST,
        gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32], rows),
        gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N // 2, 32], rows),
        gl.BlockedLayout([1], [32], [4], [0], [[0]] if CLUSTER > 1 else []),
    )  # fmt: skip
    ring = Ring(
        gl.allocate_shared_memory(a_desc.dtype, [STAGES * GROUPS, SHAPE.ROWS, BLOCK_K], a_desc.layout),
        gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], b_desc.layout),
        gl.allocate_shared_memory(out_desc.dtype, [GROUPS, SHAPE.ROWS, BLOCK_N // 2], out_desc.layout),
        gl.allocate_shared_memory(gl.int64, [STAGES, CLUSTER], own),
        gl.allocate_shared_memory(gl.int64, [STAGES, CLUSTER], own),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], together),
    )
    for stage in gl.static_range(STAGES):
        mbarrier.init(ring.full.index(stage), count=1)
        mbarrier.init(ring.empty.index(stage), count=GROUPS)
        # Init it only if it is used: see ``hopper_matmul_kernel``.
        if MULTICAST == "direct":
            mbarrier.init(ring.shared.index(stage), count=GROUPS)
        elif MULTICAST == "relay":
            mbarrier.init(ring.shared.index(stage), count=1)
    fence_async_shared()
    problem = Problem(a_scale, b_scale, gl.cdiv(M, GROUPS * SHAPE.ROWS), gl.cdiv(N, BLOCK_N), gl.cdiv(K, BLOCK_K))
    gl.warp_specialize(
        [
            (_multiply, (out_desc, ring, problem, gl.constexpr(0), SHAPE)),
            (_multiply, (out_desc, ring, problem, gl.constexpr(1), SHAPE)),
            (_load, (a_desc, b_desc, ring, problem, SHAPE)),
        ],
        [4, 1],
        [240, 24],
    )
