"""The epilogue of a warp-specialized GEMM for Hopper, dense or grouped: from the sums of a wave to rows of ``out``."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tritonfp8.kernels.gemm.pipeline import WAVE_ROWS
from tritonfp8.kernels.names import tma_store

WARP_SIZE: gl.constexpr = gl.constexpr(32)
GROUP_WARPS: gl.constexpr = gl.constexpr(4)

# What is done with sums. HALVES: half of the columns at a time, in half the registers and shared memory. SHARED_TILES:
# rows of a tile may belong to another group, and are not stored.
Epilogue = namedtuple(
    "Epilogue",
    "SCALED HAS_BIAS HALVES ACTIVATION HAS_RESIDUAL SWAP SHARED_TILES",
    defaults=(None, False, False, False),
)
# Where a group stores: TMA descriptor, the group's buffer; pointer, for rows of a tile that are stored alone.
Output = namedtuple("Output", "desc buf pointer")
# An epilogue vector for the columns of a wave: for each half of them with HALVES, otherwise twice the same.
Halves = namedtuple("Halves", "left right")
# Scales and bias of a wave. The bias of swapped operands belongs to rows, and has no halves.
Vectors = namedtuple("Vectors", "a_scale b_scale bias")
# First row and column of a wave, its first row in ``out``, and which rows are stored: ``[skipped, limit)``.
Wave = namedtuple("Wave", "row col out_row skipped limit")


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
def read_halves(pointer, col, end, stride, WIDTH: gl.constexpr, HALVES: gl.constexpr):
    """Load an epilogue vector for the WIDTH columns of a wave."""
    PART: gl.constexpr = WIDTH // 2 if HALVES else WIDTH
    left = read_columns(pointer, col, end, stride, PART)
    right = left
    if HALVES:
        right = read_columns(pointer, col + PART, end, stride, PART)
    return Halves(left, right)


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
def _store_rows(out, wave, N, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Store the rows of a wave that belong to its group, by threads: TMA stores whole tiles."""
    VECTOR: gl.constexpr = 128 // out.desc.dtype.primitive_bitwidth
    ACROSS: gl.constexpr = COLS // VECTOR if COLS // VECTOR < WARP_SIZE else WARP_SIZE
    plain: gl.constexpr = gl.BlockedLayout([1, VECTOR], [WARP_SIZE // ACROSS, ACROSS], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, plain))
    # TMA stores here, too, so N is a multiple of 16 bytes: threads can store as much at once.
    cols = gl.multiple_of(wave.col + gl.arange(0, COLS, gl.SliceLayout(0, plain)), VECTOR)
    firsts = gl.multiple_of((wave.out_row + rows).to(gl.int64) * N, VECTOR)
    mask = ((rows >= wave.skipped) & (rows < wave.limit))[:, None] & (cols < N)[None, :]
    pointers = out.pointer + firsts[:, None] + cols[None, :]
    gl.store(pointers, out.buf.load(plain), mask=gl.max_constancy(mask, [1, VECTOR]))


@gluon.jit
def _finish(acc, out, wave, vectors, problem, RIGHT: gl.constexpr, EPILOGUE: gl.constexpr, layout: gl.constexpr):
    """Scales -> bias -> activation -> residual -> output dtype -> shared memory -> out."""
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    col_layout: gl.constexpr = gl.SliceLayout(0, layout)
    if EPILOGUE.SCALED:
        # One scale after the other: their product may over- or underflow float32 even if the result does not.
        b_scale = vectors.b_scale.right if RIGHT else vectors.b_scale.left
        acc *= gl.convert_layout(vectors.a_scale, row_layout)[:, None]
        acc *= gl.convert_layout(b_scale, col_layout)[None, :]
    if EPILOGUE.HAS_BIAS:
        if EPILOGUE.SWAP:
            acc += vectors.bias.to(gl.float32)[:, None]
        else:
            bias = vectors.bias.right if RIGHT else vectors.bias.left
            acc += gl.convert_layout(bias.to(gl.float32), col_layout)[None, :]
    acc = _activate(acc, EPILOGUE.ACTIVATION)
    if EPILOGUE.HAS_RESIDUAL:
        rows = wave.row + gl.arange(0, acc.shape[0], row_layout)
        cols = wave.col + gl.arange(0, acc.shape[1], col_layout)
        offsets = rows.to(gl.int64)[:, None] * problem.stride_rm + cols.to(gl.int64)[None, :] * problem.stride_rn
        mask = (rows < problem.M)[:, None] & (cols < problem.N)[None, :]
        acc += gl.load(problem.residual + offsets, mask=mask, other=0.0).to(gl.float32)
    tma.store_wait(0)
    if EPILOGUE.SWAP:
        out.buf.permute((1, 0)).store(acc.to(out.desc.dtype))
        fence_async_shared()
        tma_store(out.desc, [wave.out_row + wave.col, wave.row], out.buf)
    elif not EPILOGUE.SHARED_TILES:
        out.buf.store(acc.to(out.desc.dtype))
        fence_async_shared()
        tma_store(out.desc, [wave.out_row + wave.row, wave.col], out.buf)
    else:
        out.buf.store(acc.to(out.desc.dtype))
        if (wave.limit >= acc.shape[0]) & (wave.skipped <= 0):
            fence_async_shared()
            tma_store(out.desc, [wave.out_row, wave.col], out.buf)
        else:
            _store_rows(out, wave, problem.N, acc.shape[0], acc.shape[1])


@gluon.jit
def store_wave(acc, out, wave, vectors, problem, EPILOGUE: gl.constexpr, layout: gl.constexpr):
    """Epilogue of one wave, ``acc [64, columns]`` in ``layout``."""
    if EPILOGUE.HALVES:
        HALF: gl.constexpr = acc.shape[1] // 2
        half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
        left, right = gl.split(acc.reshape((WAVE_ROWS, 2, HALF)).permute((0, 2, 1)))
        _finish(gl.convert_layout(left, half), out, wave, vectors, problem, False, EPILOGUE, half)
        beside = Wave(wave.row, wave.col + HALF, wave.out_row, wave.skipped, wave.limit)
        _finish(gl.convert_layout(right, half), out, beside, vectors, problem, True, EPILOGUE, half)
    else:
        _finish(acc, out, wave, vectors, problem, False, EPILOGUE, layout)
