"""FP8 GEMM with scales constant along K (tensorwise, rowwise), applied once in the epilogue.

Also the reduction of the partial sums of every split-K GEMM.
"""

import triton
import triton.language as tl

from tritonfp8.kernels.gemm.tiles import Target, load_operand, multiply, piece_of_work, store_part, store_tile
from tritonfp8.kernels.names import DISABLE_LICM_OF_TILES
from tritonfp8.kernels.pdl import begin


@triton.jit
def scale_tile(acc, a_scale_ptr, b_scale_ptr, row, col, M, N, stride_a_scale, stride_b_scale):
    """Apply one scale after the other: their product may over- or underflow float32 even if the result does not."""
    rows = row + tl.arange(0, acc.shape[0])
    cols = col + tl.arange(0, acc.shape[1])
    acc *= tl.load(a_scale_ptr + rows * stride_a_scale, mask=rows < M, other=0.0)[:, None]
    return acc * tl.load(b_scale_ptr + cols * stride_b_scale, mask=cols < N, other=0.0)[None, :]


@triton.jit
def scaled_matmul_kernel(
    a, b, out, a_scale_ptr, b_scale_ptr, bias_ptr, residual_ptr, M, N, K,
    stride_am, stride_ak, stride_bn, stride_bk, stride_out, stride_rm, stride_rn, stride_a_scale, stride_b_scale,
    split_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PROMOTE_EVERY: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    TMA: tl.constexpr, TMA_OUT: tl.constexpr, HALVES: tl.constexpr, FLATTEN: tl.constexpr,
    SWAP: tl.constexpr, SPLIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``out [M, N] = epilogue((a [M, K] @ b [N, K].T) * a_scale * b_scale)``; each program walks over output tiles.

    ``a`` and ``b`` are TMA descriptors if TMA, else pointers; ``out`` likewise by TMA_OUT. A scale stride of 0 means a
    tensorwise scale. The tensor core's sums are promoted to float32 every PROMOTE_EVERY elements of K (None: never).
    SWAP multiplies ``b`` by ``a.T``, for small M. SPLIT makes ``split_k`` programs share the K of a tile: ``out`` is
    then a float32 workspace of ``split_k`` unscaled partial sums of whole tiles.
    """
    begin(DEPENDENT)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pieces = tiles_m * tiles_n * split_k
    for piece in tl.range(
        tl.program_id(0), pieces, tl.num_programs(0), flatten=FLATTEN, disable_licm=DISABLE_LICM_OF_TILES
    ):
        tile_m, tile_n, part, first, last = piece_of_work(piece, tiles_m, tiles_n, K, split_k, BLOCK_K, GROUP_M, SPLIT)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32) if SWAP else tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(first, last, BLOCK_K, disable_licm=DISABLE_LICM_OF_TILES):
            lhs = load_operand(a, row, k, M, K, stride_am, stride_ak, BLOCK_M, BLOCK_K, TMA)
            rhs = load_operand(b, col, k, N, K, stride_bn, stride_bk, BLOCK_N, BLOCK_K, TMA)
            acc = multiply(lhs, rhs, acc, SWAP, PROMOTE_EVERY)
        if SWAP:
            acc = acc.T
        if SPLIT:
            store_part(acc, out, part, row, col, M, N, tiles_m * BLOCK_M, stride_out)
        else:
            acc = scale_tile(acc, a_scale_ptr, b_scale_ptr, row, col, M, N, stride_a_scale, stride_b_scale)
            store_tile(
                acc, Target(out, bias_ptr, residual_ptr, M, N, stride_out, stride_rm, stride_rn), row, col,
                HAS_BIAS, ACTIVATION, HAS_RESIDUAL, TMA_OUT, HALVES,
            )  # fmt: skip


@triton.jit
def reduce_parts_kernel(
    parts, out, a_scale_ptr, b_scale_ptr, bias_ptr, residual_ptr, M, N, rows,
    stride_parts, stride_out, stride_rm, stride_rn, stride_a_scale, stride_b_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr, SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``out [M, N] = epilogue(sum of SPLIT_K partial sums)``; each has ``rows`` rows of the float32 workspace.

    The order of the sum is fixed, so every run gives the same bits. SCALED applies the scales of
    ``scaled_matmul_kernel``.
    """
    begin(DEPENDENT)
    tiles_n = tl.cdiv(N, BLOCK_N)
    row = tl.program_id(0) // tiles_n * BLOCK_M
    col = tl.program_id(0) % tiles_n * BLOCK_N
    offs_row = row + tl.arange(0, BLOCK_M)
    offs_col = col + tl.arange(0, BLOCK_N)
    mask = (offs_row < M)[:, None] & (offs_col < N)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for part in tl.static_range(SPLIT_K):
        offsets = (part * rows + offs_row).to(tl.int64)[:, None] * stride_parts + offs_col[None, :]
        acc += tl.load(parts + offsets, mask=mask, other=0.0)
    if SCALED:
        acc = scale_tile(acc, a_scale_ptr, b_scale_ptr, row, col, M, N, stride_a_scale, stride_b_scale)
    store_tile(
        acc, Target(out, bias_ptr, residual_ptr, M, N, stride_out, stride_rm, stride_rn), row, col,
        HAS_BIAS, ACTIVATION, HAS_RESIDUAL, False, False,
    )  # fmt: skip
