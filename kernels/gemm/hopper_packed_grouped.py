"""The GEMM on weights of 4-bit codes (:mod:`tritonfp8.kernels.gemm.hopper_packed`), for groups of tokens.

Each group is multiplied by the matrix of its expert. The matrices lie one below the other, so a tile differs from a
dense one in its first row of codes, its first token, and in the results that are stored. A tile that reaches beyond its
group also multiplies tokens of the groups beside it. Threads store the results of the group's own tokens.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_wait

from tritonfp8.kernels.gemm.epilogue import read_columns, read_rows
from tritonfp8.kernels.gemm.hopper_packed import BLOCK, BLOCKS, Packed, allocate, fill_stage, sum_steps
from tritonfp8.kernels.gemm.pipeline import WAVE_ROWS, Problem, Schedule, Stage, Tile, next_stage
from tritonfp8.kernels.group_table import FIELDS as TABLE_FIELDS

FIELDS: gl.constexpr = gl.constexpr(TABLE_FIELDS.value)
# A tile of all matrices; the first row of its matrix and the end of its rows, 0 of no matrix; the tokens of its group.
Item = namedtuple("Item", "tile first_row end_row start end")


@gluon.jit
def _item(piece, table_ptr, problem, SCHEDULE: gl.constexpr):
    """Work item ``piece``: a tile of each group's tokens, its rows of the weight in turn."""
    at = table_ptr + (piece // problem.tiles_m) * FIELDS
    group, token, end, start = gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3)
    is_group = group < problem.groups
    first_row = gl.where(is_group, group, 0) * problem.M
    # Rows of no group have no steps, so that their sums are zero.
    tile = Tile(
        first_row + (piece % problem.tiles_m) * SCHEDULE.BLOCK_M, token, 0, gl.where(is_group, problem.steps, 0)
    )
    return Item(tile, first_row, gl.where(is_group, first_row + problem.M, 0), start, end)


@gluon.jit
def _load(a_desc, b_desc, table_ptr, ring, problem, pieces, SCHEDULE: gl.constexpr):
    """The producer warp: load all steps of this program's tiles."""
    stage = Stage(gl.to_tensor(0), gl.to_tensor(0))
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        tile = _item(piece, table_ptr, problem, SCHEDULE).tile
        for step in range(tile.first, tile.last):
            mbarrier.wait(ring.empty.index(stage.slot), stage.phase ^ 1)
            fill_stage(a_desc, b_desc, ring, tile.row, tile.col, step, stage.slot, SCHEDULE)
            stage = next_stage(stage, SCHEDULE.STAGES)


@gluon.jit
def _multiply(
    out_ptr, table_ptr, ring, problem, pieces, packed, SCHEDULE: gl.constexpr, HAS_BIAS: gl.constexpr,
    ALIGNED: gl.constexpr,
):  # fmt: skip
    """The warp group: 64 rows of the weight and the tokens of each tile."""
    WIDTH: gl.constexpr = SCHEDULE.WIDTH
    LAYOUT: gl.constexpr = SCHEDULE.LAYOUT
    M = problem.M
    stage = Stage(gl.to_tensor(0), gl.to_tensor(0))
    for piece in range(gl.program_id(0), pieces, gl.num_programs(0)):
        item = _item(piece, table_ptr, problem, SCHEDULE)
        row, token = item.tile.row, item.tile.col
        # Load before the main loop, to hide the latency.
        a_scale = read_rows(problem.a_scale, row, item.end_row, problem.stride_am, LAYOUT)
        b_scale = read_columns(problem.b_scale, token, item.end, problem.stride_bn, WIDTH)
        acc, _, stage = sum_steps(ring, problem, packed, item.tile, item.end_row, stage, 0, SCHEDULE, ALIGNED)
        # One scale after the other: their product may over- or underflow float32 even if the result does not. The last
        # product and the bias become one instruction, so the order is as in the GEMM on expanded codes.
        acc *= gl.convert_layout(b_scale, gl.SliceLayout(0, LAYOUT))[None, :]
        acc *= gl.convert_layout(a_scale, gl.SliceLayout(1, LAYOUT))[:, None]
        if HAS_BIAS:
            bias = read_rows(problem.bias, row, item.end_row, 1, LAYOUT)
            acc += bias.to(gl.float32)[:, None]
        rows = row - item.first_row + gl.arange(0, WAVE_ROWS, gl.SliceLayout(1, LAYOUT))
        tokens = token + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
        mask = (rows < M)[:, None] & ((tokens >= item.start) & (tokens < item.end))[None, :]
        out = out_ptr + tokens.to(gl.int64)[None, :] * M + rows[:, None]
        gl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["entries", "groups", "M", "N", "K", "stride_am", "stride_bn"])
def hopper_packed_grouped_kernel(
    a_desc, b_desc, out_ptr, a_scale, b_scale, exponents, bias_ptr, table_ptr, entries, groups, M, N, K,
    stride_am, stride_bn,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, HAS_BIAS: gl.constexpr,
    STAGES: gl.constexpr, PROMOTE: gl.constexpr, ALIGNED: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """``out[n] = b[n] @ a[g].T`` for each token ``n`` of group ``g``, where the codes ``a [groups, M, K]`` are packed.

    Args that ``hopper_packed_matmul_kernel`` has are as there, of the matrices one below the other. ``out`` is
    ``[N, M]`` contiguous, ``bias`` ``[groups, M]``. The table is of tiles of BLOCK_N tokens
    (``group_table.row_tiles_kernel``); ``entries`` are those before its number of tiles.
    """
    gl.static_assert(BLOCK_M == WAVE_ROWS and BLOCK_K == BLOCK * BLOCKS and BLOCK_N <= 128, "a tile is one wave")
    SCHEDULE: gl.constexpr = Schedule(
        BLOCK_M, BLOCK_N, BLOCK_K, 1, STAGES, 0, 0, 1, BLOCK_N,
        gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32]), PROMOTE, False, False, 1, GROUPED=True,
    )  # fmt: skip
    ring = allocate(a_desc, b_desc, None, 0, 0, SCHEDULE)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ring.full.index(stage), count=1)
        mbarrier.init(ring.empty.index(stage), count=1)
    # TMA loads arrive at these barriers: the fence makes them visible to TMA.
    fence_async_shared()
    if DEPENDENT:
        gdc_wait()
    tiles = gl.load(table_ptr + entries * FIELDS)
    tiles_m = gl.cdiv(M, BLOCK_M)
    problem = Problem(
        a_scale, b_scale, bias_ptr, None, M, N, tiles_m, tiles, gl.cdiv(K, BLOCK_K), groups, None, None, None, None,
        stride_am, 0, stride_bn, 0, None,
    )  # fmt: skip
    pieces = tiles * tiles_m
    packed = Packed(exponents, K // BLOCK)
    gl.warp_specialize(
        [
            (_multiply, (out_ptr, table_ptr, ring, problem, pieces, packed, SCHEDULE, HAS_BIAS, ALIGNED)),
            (_load, (a_desc, b_desc, table_ptr, ring, problem, pieces, SCHEDULE)),
        ],
        [1],
        [24],
    )
