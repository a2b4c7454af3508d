"""Device code shared by the GEMM kernels: tile order, operand loads, epilogue."""

from collections import namedtuple

import triton
import triton.language as tl

# Where an epilogue stores ``[M, N]``, and what it adds. ``out`` is a TMA descriptor or a pointer.
Target = namedtuple("Target", "out bias_ptr residual_ptr M N stride_out stride_rm stride_rn")


@triton.jit
def tile_index(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of the ``tile``-th tile, in groups of GROUP_M rows so that neighbours share operands in L2."""
    per_group = GROUP_M * tiles_n
    first_m = (tile // per_group) * GROUP_M
    rows = tl.minimum(tiles_m - first_m, GROUP_M)
    within = tile % per_group
    return first_m + within % rows, within // rows


@triton.jit
def piece_of_work(
    piece, tiles_m, tiles_n, K, split_k, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT: tl.constexpr
):
    """Work item ``piece``, a tile or with SPLIT one split of its K: tile row and column, split, first and last K."""
    if SPLIT:
        tiles = tiles_m * tiles_n
        steps = tl.cdiv(K, BLOCK_K)
        part = piece // tiles
        tile_m, tile_n = tile_index(piece % tiles, tiles_m, tiles_n, GROUP_M)
        first = (part * steps // split_k) * BLOCK_K
        last = tl.minimum(((part + 1) * steps // split_k) * BLOCK_K, K)
        return tile_m, tile_n, part, first, last
    else:
        tile_m, tile_n = tile_index(piece, tiles_m, tiles_n, GROUP_M)
        return tile_m, tile_n, 0, 0, K


@triton.jit
def multiply(lhs, rhs, acc, SWAP: tl.constexpr, PROMOTE_EVERY: tl.constexpr):
    """``acc + lhs @ rhs.T``, or with SWAP its transpose: the rows of ``rhs`` are then the M dim of the instruction."""
    if SWAP and PROMOTE_EVERY is not None:
        # Equal to promotion inside the dot, but ptxas does not insert a wait after each instruction.
        tl.static_assert(rhs.shape[1] <= PROMOTE_EVERY, "a step of K is promoted as a whole")
        return acc + tl.dot(rhs, lhs.T)
    elif SWAP:
        return tl.dot(rhs, lhs.T, acc)
    else:
        return tl.dot(lhs, rhs.T, acc, max_num_imprecise_acc=PROMOTE_EVERY)


@triton.jit
def load_operand(
    source, row, k, rows, K, stride_row, stride_k, BLOCK_ROWS: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr
):
    """Load ``[BLOCK_ROWS, BLOCK_K]`` of a K-major operand at ``(row, k)``; zeros out of bounds."""
    if TMA:
        return source.load([row, k])
    else:
        offs_row = row + tl.arange(0, BLOCK_ROWS)
        offs_k = k + tl.arange(0, BLOCK_K)
        offsets = offs_row.to(tl.int64)[:, None] * stride_row + offs_k.to(tl.int64)[None, :] * stride_k
        return tl.load(source + offsets, mask=(offs_row < rows)[:, None] & (offs_k < K)[None, :], other=0.0)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Apply the epilogue's activation to a float32 tile; None is the identity."""
    if ACTIVATION == "relu":
        # NaN stays NaN, as in torch.
        return tl.where(x < 0.0, 0.0, x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    else:
        return x


@triton.jit
def _store_columns(
    acc, target, row, col,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    rows = row + tl.arange(0, acc.shape[0])
    cols = col + tl.arange(0, acc.shape[1])
    mask = (rows < target.M)[:, None] & (cols < target.N)[None, :]
    if HAS_BIAS:
        acc += tl.load(target.bias_ptr + cols, mask=cols < target.N, other=0.0).to(tl.float32)[None, :]
    acc = activate(acc, ACTIVATION)
    if HAS_RESIDUAL:
        offsets = rows.to(tl.int64)[:, None] * target.stride_rm + cols.to(tl.int64)[None, :] * target.stride_rn
        acc += tl.load(target.residual_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if TMA:
        target.out.store([row, col], acc.to(target.out.dtype))
    else:
        pointers = target.out + rows.to(tl.int64)[:, None] * target.stride_out + cols[None, :]
        tl.store(pointers, acc.to(target.out.dtype.element_ty), mask=mask)


@triton.jit
def store_tile(
    acc, target, row, col, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    TMA: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Epilogue: bias -> activation -> residual -> output dtype -> store in a :class:`Target`.

    HALVES stores half of the columns at a time. That takes half the shared memory, which leaves room for one more stage
    of the main loop.
    """
    if HALVES:
        BLOCK_M: tl.constexpr = acc.shape[0]
        HALF: tl.constexpr = acc.shape[1] // 2
        left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        _store_columns(left, target, row, col, HAS_BIAS, ACTIVATION, HAS_RESIDUAL, TMA)
        _store_columns(right, target, row, col + HALF, HAS_BIAS, ACTIVATION, HAS_RESIDUAL, TMA)
    else:
        _store_columns(acc, target, row, col, HAS_BIAS, ACTIVATION, HAS_RESIDUAL, TMA)


@triton.jit
def store_part(acc, workspace, part, row, col, M, N, rows, stride):
    """Store a split-K partial sum (float32, ``rows`` rows a split); ``reduce_parts_kernel`` adds them up."""
    offs_row = row + tl.arange(0, acc.shape[0])
    offs_col = col + tl.arange(0, acc.shape[1])
    offsets = (part * rows + offs_row).to(tl.int64)[:, None] * stride + offs_col[None, :]
    tl.store(workspace + offsets, acc, mask=(offs_row < M)[:, None] & (offs_col < N)[None, :])
