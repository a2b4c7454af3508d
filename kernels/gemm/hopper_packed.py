"""FP8 GEMM for Hopper over a weight of 4-bit codes, two a byte: warp groups expand codes to e4m3 in registers.

wgmma takes its first operand from registers, so weights are the rows of a tile and tokens its columns. A thread of this
operand has four elements that follow each other along K: two bytes of codes, which become one register, without a store
to shared memory and without a barrier. Products and their sums are as in ``hopper_matmul_kernel``: results have the
bits of its results with the expanded weight. Two groups take turns, so that one expands while the other multiplies:

    group 0    | expand 0 | multiply 0           | expand 1 | multiply 1           |
    group 1    |          | expand 0             | multiply 0          | expand 1   | multiply 1 |
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
from triton.language.extra.cuda import gdc_wait

from tritonfp8.kernels.gemm.epilogue import Epilogue, Halves, Output, Vectors, Wave, read_columns, read_rows, store_wave
from tritonfp8.kernels.gemm.hopper_dense import EARLY_STEPS
from tritonfp8.kernels.gemm.hopper_dense import _piece as piece_of
from tritonfp8.kernels.gemm.hopper_dense import _pieces as pieces_of
from tritonfp8.kernels.gemm.pipeline import WAVE_ROWS, Pipeline, Problem, Schedule, Stage, Tile, next_stage
from tritonfp8.kernels.names import tma_load

BLOCK: gl.constexpr = gl.constexpr(32)
# Steps of K are of 128: four blocks.
BLOCKS: gl.constexpr = gl.constexpr(4)
# Four exponents, the exponent of the row, two numbers that depend on it -> for each block e4m3 of 0, 0.5, 1, 1.5, 2, 3,
# 4, 6 by the row's scale, in two registers. Where a number is normal its exponent is in bits 3 to 6. Of a block far
# below the largest one some are not: all are then rounded, by way of float16.
_MAGNITUDES: gl.constexpr = gl.constexpr(
    """
{
    .reg .pred is_usual;
    .reg .b32 least, e0, e1, e2, e3, of_low, of_high;
    prmt.b32 e0, $8, 0, 0x4440;
    prmt.b32 e1, $8, 0, 0x4441;
    prmt.b32 e2, $8, 0, 0x4442;
    prmt.b32 e3, $8, 0, 0x4443;
    sub.s32 least, $12, 5;
    mad.lo.s32 of_low, $12, 0xf7f7f800, 0x3c383000;
    mad.lo.s32 of_high, $12, 0xf7f7f7f8, 0x4c484440;
    setp.ge.s32 is_usual, e0, least;
    setp.ge.and.s32 is_usual, e1, least, is_usual;
    setp.ge.and.s32 is_usual, e2, least, is_usual;
    setp.ge.and.s32 is_usual, e3, least, is_usual;
    mad.lo.s32 $0, e0, 0x08080800, of_low;
    mad.lo.s32 $1, e1, 0x08080800, of_low;
    mad.lo.s32 $2, e2, 0x08080800, of_low;
    mad.lo.s32 $3, e3, 0x08080800, of_low;
    mad.lo.s32 $4, e0, 0x08080808, of_high;
    mad.lo.s32 $5, e1, 0x08080808, of_high;
    mad.lo.s32 $6, e2, 0x08080808, of_high;
    mad.lo.s32 $7, e3, 0x08080808, of_high;
    @is_usual bra DONE;
"""
    + "".join(
        f"""
    {{
        .reg .b32 x, y, factor;
        .reg .b16 c0, c1;
        sub.s32 factor, e{i}, $12;
        max.s32 factor, factor, -14;
        min.s32 factor, factor, 15;
        mad.lo.s32 factor, factor, 0x04000400, 0x3c003c00;
        mov.b32 x, 0x38000000;
        mov.b32 y, 0x3e003c00;
        mul.f16x2 x, x, factor;
        mul.f16x2 y, y, factor;
        cvt.rn.satfinite.e4m3x2.f16x2 c0, x;
        cvt.rn.satfinite.e4m3x2.f16x2 c1, y;
        mov.b32 ${i}, {{c0, c1}};
        mov.b32 x, 0x42004000;
        mov.b32 y, 0x46004400;
        mul.f16x2 x, x, factor;
        mul.f16x2 y, y, factor;
        cvt.rn.satfinite.e4m3x2.f16x2 c0, x;
        cvt.rn.satfinite.e4m3x2.f16x2 c1, y;
        mov.b32 ${i + 4}, {{c0, c1}};
    }}
"""
        for i in range(4)
    )
    + """
DONE:
}
"""
)
# Two bytes hold four codes, the first one in the low bits. Magnitudes select bytes of the table. A permutation makes
# 0xff of a byte whose highest bit is set: the sign of every second code, and 20 bits higher of the others.
_LOOK_UP: gl.constexpr = gl.constexpr("""
{
    .reg .b32 magnitudes, signs;
    and.b32 magnitudes, $1, 0x7777;
    mul.lo.u32 signs, $1, 0x100001;
    prmt.b32 signs, signs, 0, 0x9b8a;
    prmt.b32 magnitudes, $5, $9, magnitudes;
    lop3.b32 $0, magnitudes, signs, 0x80808080, 0xf8;
}
""")
# The operand in registers, [64, 32, 4] of [64, 128]: as in the PTX documentation of wgmma, four elements a register.
_QUADS: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0], [0, 4, 0], [0, 8, 0], [0, 16, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [WAVE_ROWS.value, 32, 4],
    )
)
_WORDS: gl.constexpr = gl.constexpr(gl.SliceLayout(2, _QUADS.value))
# Blocks of the words: [64, 4, 8].
_OF_BLOCKS: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 2, 0], [8, 0, 0], [0, 0, 4]],
        [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [WAVE_ROWS.value, 4, 8],
    )
)
_TABLE: gl.constexpr = gl.constexpr(gl.SliceLayout(2, _OF_BLOCKS.value))
_ROWS: gl.constexpr = gl.constexpr(gl.SliceLayout(1, _TABLE.value))
# Exponents, uint8 ``[M, blocks]`` contiguous.
Packed = namedtuple("Packed", "exponents blocks")


@gluon.jit
def allocate(a_desc, b_desc, out_desc, OUT_ROWS: gl.constexpr, OUT_COLS: gl.constexpr, SCHEDULE: gl.constexpr):
    """Shared memory of a program: stages of codes and of tokens, and a buffer a group where ``out_desc`` is given."""
    STAGES: gl.constexpr = SCHEDULE.STAGES
    GROUPS: gl.constexpr = 1 if SCHEDULE.BLOCK_M == WAVE_ROWS else 2
    a = gl.allocate_shared_memory(a_desc.dtype, [STAGES, SCHEDULE.BLOCK_M, SCHEDULE.BLOCK_K // 2], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [STAGES, SCHEDULE.BLOCK_N, SCHEDULE.BLOCK_K], b_desc.layout)
    out = a
    if out_desc is not None:
        out = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, OUT_ROWS, OUT_COLS], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    return Pipeline(a, b, a, b, out, full, empty, turn)


@gluon.jit
def fill_stage(a_desc, b_desc, ring, row, col, step, stage, SCHEDULE: gl.constexpr):
    """:func:`.pipeline.fill_stage`, where a byte of the first operand has two elements."""
    K: gl.constexpr = SCHEDULE.BLOCK_K
    ready = ring.full.index(stage)
    mbarrier.expect(ready, SCHEDULE.BLOCK_M * (K // 2) + SCHEDULE.BLOCK_N * K)
    tma_load(a_desc, [row, step * (K // 2)], ready, ring.a.index(stage))
    tma_load(b_desc, [col, step * K], ready, ring.b.index(stage))


@gluon.jit
def _load(a_desc, b_desc, problem, ring, filled, SCHEDULE: gl.constexpr):
    """The producer warp: load all steps of this program's work items, after the ``filled`` first steps."""
    stage = Stage(filled % SCHEDULE.STAGES, filled // SCHEDULE.STAGES)
    for piece in range(gl.program_id(0), pieces_of(problem, SCHEDULE.SPLIT), gl.num_programs(0)):
        tile, _ = piece_of(piece, problem, SCHEDULE)
        before = gl.where(piece == gl.program_id(0), filled, 0)
        for step in range(tile.first + before, tile.last):
            mbarrier.wait(ring.empty.index(stage.slot), stage.phase ^ 1)
            fill_stage(a_desc, b_desc, ring, tile.row, tile.col, step, stage.slot, SCHEDULE)
            stage = next_stage(stage, SCHEDULE.STAGES)


@gluon.jit
def _exponents(packed, rows, is_row, step, ALIGNED: gl.constexpr):
    """Exponents of the four blocks of a step, int32 ``[64]``, the first in the low bits; 0 behind the end of a row."""
    if ALIGNED:
        words = packed.exponents.to(gl.pointer_type(gl.int32), bitcast=True)
        offsets = rows.to(gl.int64) * (packed.blocks // BLOCKS) + step
        return gl.load(words + offsets, mask=is_row & (step * BLOCKS < packed.blocks), other=0)
    else:
        offsets = rows.to(gl.int64) * packed.blocks + step * BLOCKS
        found = gl.zeros_like(rows)
        for i in gl.static_range(BLOCKS):
            mask = is_row & (step * BLOCKS + i < packed.blocks)
            found |= gl.load(packed.exponents + offsets + i, mask=mask, other=0).to(gl.int32) << (8 * i)
        return found


@gluon.jit
def _expand(codes, exponents, of_rows, GROUP: gl.constexpr, PARENT: gl.constexpr):
    """Codes of this group's 64 rows -> e4m3 ``[64, 128]`` in registers, the first operand of a wgmma."""
    as_words: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    words = codes._reinterpret(gl.int16, [codes.shape[0], BLOCK], as_words).slice(GROUP * WAVE_ROWS, WAVE_ROWS)
    words = words.load(_WORDS).to(gl.uint16, bitcast=True).to(gl.int32)
    four = gl.convert_layout(exponents, _ROWS)[:, None] + gl.zeros([WAVE_ROWS, BLOCKS], gl.int32, _TABLE)
    low, high = gl.inline_asm_elementwise(
        _MAGNITUDES, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r",
        [four, gl.convert_layout(of_rows, _ROWS)[:, None]],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=4,
    )  # fmt: skip
    quads = gl.inline_asm_elementwise(
        _LOOK_UP, "=r,r,r,r,r,r,r,r,r,r,r,r,r",
        [
            words[:, :, None] + gl.zeros([WAVE_ROWS, BLOCK, 4], gl.int32, _QUADS),
            _spread(low), _spread(high),
        ],
        dtype=gl.uint8, is_pure=True, pack=4,
    )  # fmt: skip
    values = quads.reshape([WAVE_ROWS, 4 * BLOCK]).to(gl.float8e4nv, bitcast=True)
    return gl.convert_layout(values, gl.DotOperandLayout(0, PARENT, 4))


@gluon.jit
def _spread(table):
    """A number a block ``[64, 4]`` -> ``[64, 32, 4]``, for each word of codes."""
    of_blocks = table[:, :, None]
    words = of_blocks + gl.zeros([WAVE_ROWS, BLOCKS, BLOCK // BLOCKS], gl.int32, _OF_BLOCKS)
    return gl.convert_layout(words.reshape([WAVE_ROWS, BLOCK]), _WORDS)[:, :, None]


@gluon.jit
def sum_steps(
    ring, problem, packed, tile, end, stage, GROUP: gl.constexpr, SCHEDULE: gl.constexpr, ALIGNED: gl.constexpr
):  # fmt: skip
    """Sum the steps of a tile for this group's 64 rows, up to ``end``: one or two waves of columns, one operand."""
    WIDTH: gl.constexpr = SCHEDULE.WIDTH
    rows = tile.row + gl.arange(0, WAVE_ROWS, gl.SliceLayout(1, SCHEDULE.LAYOUT))
    is_row = rows < end
    # The exponent of a scale, a power of two. Of a row with a NaN, or without any, what is read does not matter.
    scale = gl.load(problem.a_scale + rows.to(gl.int64) * problem.stride_am, mask=is_row, other=1.0)
    of_rows = scale.to(gl.int32, bitcast=True) >> 23
    acc0 = gl.zeros((WAVE_ROWS, WIDTH), gl.float32, SCHEDULE.LAYOUT)
    acc1 = acc0
    product = acc0
    exponents = _exponents(packed, rows, is_row, tile.first, ALIGNED)
    for step in range(tile.first, tile.last):
        following = _exponents(packed, rows, is_row, step + 1, ALIGNED)
        mbarrier.wait(ring.full.index(stage.slot), stage.phase)
        operand = _expand(ring.a.index(stage.slot), exponents, of_rows, GROUP, SCHEDULE.LAYOUT)
        tokens = ring.b.index(stage.slot)
        left = tokens.slice(0, WIDTH).permute((1, 0))
        right = tokens.slice(SCHEDULE.BLOCK_N - WIDTH, WIDTH).permute((1, 0))
        if SCHEDULE.PROMOTE:
            token = warpgroup_mma(operand, left, product, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(0, deps=[token])
            acc0 += product
            if SCHEDULE.WAVES == 2:
                # Promote before the next wgmma overwrites the registers of ``product``. ``last < first`` is never true.
                acc0 = warpgroup_mma_wait(0, deps=[acc0])
                token = warpgroup_mma(operand, right, product, use_acc=tile.last < tile.first, is_async=True)
                product = warpgroup_mma_wait(0, deps=[token])
                acc1 += product
        else:
            token = warpgroup_mma(operand, left, acc0, is_async=True)
            acc0 = warpgroup_mma_wait(0, deps=[token])
            if SCHEDULE.WAVES == 2:
                token = warpgroup_mma(operand, right, acc1, is_async=True)
                acc1 = warpgroup_mma_wait(0, deps=[token])
        mbarrier.arrive(ring.empty.index(stage.slot), count=1)
        stage = next_stage(stage, SCHEDULE.STAGES)
        exponents = following
    return acc0, acc1, stage


@gluon.jit
def _multiply(
    out_desc, ring, problem, packed, GROUP: gl.constexpr, SCHEDULE: gl.constexpr, EPILOGUE: gl.constexpr,
    ALIGNED: gl.constexpr,
):  # fmt: skip
    """A warp group: 64 rows of each tile of the program, whose columns are one wave or two."""
    WIDTH: gl.constexpr = SCHEDULE.WIDTH
    LAYOUT: gl.constexpr = SCHEDULE.LAYOUT
    M, N = problem.M, problem.N
    stage = Stage(gl.to_tensor(0), gl.to_tensor(0))
    for piece in range(gl.program_id(0), pieces_of(problem, SCHEDULE.SPLIT), gl.num_programs(0)):
        whole, part = piece_of(piece, problem, SCHEDULE)
        row, col = whole.row + GROUP * WAVE_ROWS, whole.col
        a_scale = None
        left = None
        right = None
        bias = None
        if EPILOGUE.SCALED:
            a_scale = read_rows(problem.a_scale, row, M, problem.stride_am, LAYOUT)
            first = read_columns(problem.b_scale, col, N, problem.stride_bn, WIDTH)
            left = Halves(first, first)
            if SCHEDULE.WAVES == 2:
                second = read_columns(problem.b_scale, col + WIDTH, N, problem.stride_bn, WIDTH)
                right = Halves(second, second)
        if EPILOGUE.HAS_BIAS:
            bias = read_rows(problem.bias, row, M, 1, LAYOUT)
        tile = Tile(row, col, whole.first, whole.last)
        acc0, acc1, stage = sum_steps(ring, problem, packed, tile, M, stage, GROUP, SCHEDULE, ALIGNED)
        out = Output(out_desc, ring.out.index(GROUP), None)
        out_row = part * (problem.tiles_n * SCHEDULE.BLOCK_N)
        store_wave(
            acc0, out, Wave(row, col, out_row, None, None), Vectors(a_scale, left, bias), problem, EPILOGUE, LAYOUT
        )
        if SCHEDULE.WAVES == 2:
            beside = Wave(row, col + WIDTH, out_row, None, None)
            store_wave(acc1, out, beside, Vectors(a_scale, right, bias), problem, EPILOGUE, LAYOUT)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "K", "stride_rm", "stride_rn", "stride_am", "stride_bn", "split_k"])
def hopper_packed_matmul_kernel(
    a_desc, b_desc, out_desc, a_scale, b_scale, exponents, bias_ptr, residual_ptr, M, N, K,
    stride_rm, stride_rn, stride_am, stride_bn, split_k,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
    HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, HAS_RESIDUAL: gl.constexpr, STAGES: gl.constexpr,
    PROMOTE: gl.constexpr, SPLIT: gl.constexpr, ALIGNED: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """``out.T [N, M] = epilogue(a [M, K] @ b [N, K].T).T``, where ``a`` is packed.

    Args that ``hopper_matmul_kernel`` has are as there, with SWAP. ``a_desc`` has codes, uint8 ``[M, K / 2]``.
    ``exponents`` is uint8 ``[M, K / 32]`` contiguous, biased by 127, ALIGNED if K is a multiple of 128; otherwise K is
    one of 32. Scales of rows of ``a`` are powers of two.
    """
    GROUPS: gl.constexpr = 1 if BLOCK_M == WAVE_ROWS else 2
    gl.static_assert(BLOCK_M == GROUPS * WAVE_ROWS and BLOCK_K == BLOCK * BLOCKS, "tiles have 64 or 128 rows")
    WIDTH: gl.constexpr = BLOCK_N if BLOCK_N <= 128 else BLOCK_N // 2
    SCHEDULE: gl.constexpr = Schedule(
        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, 0, 0, BLOCK_N // WIDTH, WIDTH,
        gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32]), PROMOTE, False, False, 1, SPLIT=SPLIT,
    )  # fmt: skip
    EPILOGUE: gl.constexpr = Epilogue(
        not SPLIT, HAS_BIAS, False, ACTIVATION=ACTIVATION, HAS_RESIDUAL=HAS_RESIDUAL, SWAP=True
    )
    ring = allocate(a_desc, b_desc, out_desc, WIDTH, WAVE_ROWS, SCHEDULE)
    EARLY: gl.constexpr = EARLY_STEPS if EARLY_STEPS < STAGES else STAGES
    for stage in gl.static_range(STAGES):
        mbarrier.init(ring.full.index(stage), count=1)
        mbarrier.init(ring.empty.index(stage), count=GROUPS)
    # TMA loads arrive at these barriers next: the fence makes them visible to TMA.
    fence_async_shared()
    problem = Problem(
        a_scale, b_scale, bias_ptr, residual_ptr, M, N, gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N), gl.cdiv(K, BLOCK_K),
        None, stride_rm, stride_rn, None, None, stride_am, 0, stride_bn, 0, split_k,
    )  # fmt: skip
    packed = Packed(exponents, K // BLOCK)
    if DEPENDENT:
        gdc_wait()
    tile, _ = piece_of(gl.program_id(0), problem, SCHEDULE)
    filled = gl.minimum(tile.last - tile.first, EARLY)
    for stage in range(filled):
        fill_stage(a_desc, b_desc, ring, tile.row, tile.col, tile.first + stage, stage, SCHEDULE)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (out_desc, ring, problem, packed, gl.constexpr(0), SCHEDULE, EPILOGUE, ALIGNED)),
                (_load, (a_desc, b_desc, problem, ring, filled, SCHEDULE)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (out_desc, ring, problem, packed, gl.constexpr(0), SCHEDULE, EPILOGUE, ALIGNED)),
                (_multiply, (out_desc, ring, problem, packed, gl.constexpr(1), SCHEDULE, EPILOGUE, ALIGNED)),
                (_load, (a_desc, b_desc, problem, ring, filled, SCHEDULE)),
            ],
            [4, 1],
            [240, 24],
        )
