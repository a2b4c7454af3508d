"""FP8 matrix product whose scales leave the contraction whole: tensorwise and rowwise, applied once in the epilogue."""

import triton
import triton.language as tl

from tritonfp8.kernels.tiles import load_operand, store_tile, tile_index


@triton.jit
def scaled_matmul_kernel(
    a, b, out, a_scale_ptr, b_scale_ptr, bias_ptr, residual_ptr, M, N, K,
    stride_am, stride_ak, stride_bn, stride_bk, stride_out, stride_rm, stride_rn, stride_a_scale, stride_b_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PROMOTE_EVERY: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    TMA: tl.constexpr, TMA_OUT: tl.constexpr, HALVES: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """``out [M, N] = epilogue((a [M, K] @ b [N, K].T) * a_scale * b_scale)``; each program walks over output tiles.

    ``a`` and ``b`` are TMA descriptors if TMA, else pointers; ``out`` likewise by TMA_OUT. A scale stride of 0 is a
    tensorwise scale. PROMOTE_EVERY is how many elements of K the tensor core may add up before the sum is promoted to
    float32 (None: all of them).
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = tile_index(tile, tiles_m, tiles_n, GROUP_M)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            lhs = load_operand(a, row, k, M, K, stride_am, stride_ak, BLOCK_M, BLOCK_K, TMA)
            rhs = load_operand(b, col, k, N, K, stride_bn, stride_bk, BLOCK_N, BLOCK_K, TMA)
            acc = tl.dot(lhs, rhs.T, acc, max_num_imprecise_acc=PROMOTE_EVERY)
        rows = row + tl.arange(0, BLOCK_M)
        cols = col + tl.arange(0, BLOCK_N)
        # One scale after the other: their product may leave float32's range where the result does not.
        acc *= tl.load(a_scale_ptr + rows * stride_a_scale, mask=rows < M, other=0.0)[:, None]
        acc *= tl.load(b_scale_ptr + cols * stride_b_scale, mask=cols < N, other=0.0)[None, :]
        store_tile(
            acc, out, bias_ptr, residual_ptr, row, col, M, N, stride_out, stride_rm, stride_rn,
            HAS_BIAS, ACTIVATION, HAS_RESIDUAL, TMA_OUT, HALVES,
        )  # fmt: skip
