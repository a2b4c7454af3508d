"""A GEMM in high precision: one order of sums over K for every tile, so that a row has bits of its own."""

import triton
import triton.language as tl

from tritonfp8.kernels.gemm.tiles import Target, load_operand, store_tile, tile_index
from tritonfp8.kernels.pdl import begin


@triton.jit
def rows_matmul_kernel(
    a, b, out, bias_ptr, M, N, K, stride_am, stride_ak, stride_bn, stride_bk, stride_out,
    HAS_BIAS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``out [M, N] = a [M, K] @ b [N, K].T + bias``; a program computes one tile, over all of K.

    ``a`` and ``b`` are TMA descriptors if TMA, else pointers. PRECISION is of the products of float32.
    """
    begin(DEPENDENT)
    tile_m, tile_n = tile_index(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        lhs = load_operand(a, row, k, M, K, stride_am, stride_ak, BLOCK_M, BLOCK_K, TMA)
        rhs = load_operand(b, col, k, N, K, stride_bn, stride_bk, BLOCK_N, BLOCK_K, TMA)
        acc = tl.dot(lhs, rhs.T, acc, input_precision=PRECISION)
    target = Target(out, bias_ptr, None, M, N, stride_out, 0, 0)
    store_tile(acc, target, row, col, HAS_BIAS, None, False, False, False)
