"""FP8 GEMMs with scales that vary along K: 1x128 and 128x128 (fp32 scales), and MX (1x32, e8m0)."""

import triton
import triton.language as tl

from tritonfp8.kernels.gemm.tiles import Target, load_operand, multiply, piece_of_work, store_part, store_tile
from tritonfp8.kernels.names import DISABLE_LICM_OF_TILES
from tritonfp8.kernels.numerics import decode_e8m0, scale_blocks
from tritonfp8.kernels.pdl import begin


@triton.jit
def scale_product(product, row_scale, col_scale, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Scale the result of one step of K, by a scale for each row or column (ROWS, COLS = 1) or by one for the tile."""
    if ROWS == 1 and COLS == 1:
        return product * row_scale[:, None] * col_scale[None, :]
    elif ROWS == 1:
        return product * (row_scale * col_scale)[:, None]
    elif COLS == 1:
        return product * (row_scale * col_scale)[None, :]
    else:
        return product * (row_scale * col_scale)


@triton.jit
def block_scaled_matmul_kernel(
    a, b, out, a_scale_ptr, b_scale_ptr, bias_ptr, residual_ptr, M, N, K,
    stride_am, stride_ak, stride_bn, stride_bk, stride_out, stride_rm, stride_rn,
    stride_a_scale_m, stride_a_scale_k, stride_b_scale_n, stride_b_scale_k, split_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, SCALE_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    TMA: tl.constexpr, TMA_OUT: tl.constexpr, HALVES: tl.constexpr, FLATTEN: tl.constexpr,
    SWAP: tl.constexpr, SPLIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``out [M, N] = epilogue(sum over k blocks of (a_k @ b_k.T) * a_scale_k * b_scale_k)``.

    A scale covers SCALE_K of K, and A_ROWS or B_ROWS (1 or SCALE_K) rows of ``a`` or ``b``. Each step of K is promoted
    to float32 when its scales are applied, so accumulation is always precise. SWAP and SPLIT: see
    ``scaled_matmul_kernel``.
    """
    begin(DEPENDENT)
    tl.static_assert(BLOCK_K == SCALE_K, "one step of K has one scale")
    tl.static_assert(A_ROWS == 1 or A_ROWS % BLOCK_M == 0, "a tile of rows has one scale, or each row its own")
    tl.static_assert(B_ROWS == 1 or B_ROWS % BLOCK_N == 0, "a tile of columns has one scale, or each column its own")
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    pieces = tiles_m * tiles_n * split_k
    KEEP_IN_LOOPS: tl.constexpr = DISABLE_LICM_OF_TILES and (A_ROWS == 1 and B_ROWS == 1)
    for piece in tl.range(tl.program_id(0), pieces, tl.num_programs(0), flatten=FLATTEN, disable_licm=KEEP_IN_LOOPS):
        tile_m, tile_n, part, first, last = piece_of_work(piece, tiles_m, tiles_n, K, split_k, BLOCK_K, GROUP_M, SPLIT)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        rows = row + tl.arange(0, BLOCK_M)
        cols = col + tl.arange(0, BLOCK_N)
        if A_ROWS == 1:
            a_scales = a_scale_ptr + rows.to(tl.int64) * stride_a_scale_m
        else:
            a_scales = a_scale_ptr + (row // A_ROWS).to(tl.int64) * stride_a_scale_m
        if B_ROWS == 1:
            b_scales = b_scale_ptr + cols.to(tl.int64) * stride_b_scale_n
        else:
            b_scales = b_scale_ptr + (col // B_ROWS).to(tl.int64) * stride_b_scale_n
        if SPLIT:
            a_scales += first // SCALE_K * stride_a_scale_k
            b_scales += first // SCALE_K * stride_b_scale_k
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32) if SWAP else tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(first, last, BLOCK_K, disable_licm=KEEP_IN_LOOPS):
            lhs = load_operand(a, row, k, M, K, stride_am, stride_ak, BLOCK_M, BLOCK_K, TMA)
            rhs = load_operand(b, col, k, N, K, stride_bn, stride_bk, BLOCK_N, BLOCK_K, TMA)
            product = multiply(lhs, rhs, None, SWAP, None)
            a_scale = tl.load(a_scales, mask=rows < M, other=0.0) if A_ROWS == 1 else tl.load(a_scales)
            b_scale = tl.load(b_scales, mask=cols < N, other=0.0) if B_ROWS == 1 else tl.load(b_scales)
            a_scales += stride_a_scale_k
            b_scales += stride_b_scale_k
            if SWAP:
                acc += scale_product(product, b_scale, a_scale, B_ROWS, A_ROWS)
            else:
                acc += scale_product(product, a_scale, b_scale, A_ROWS, B_ROWS)
        if SWAP:
            acc = acc.T
        if SPLIT:
            store_part(acc, out, part, row, col, M, N, tiles_m * BLOCK_M, stride_out)
        else:
            store_tile(
                acc, Target(out, bias_ptr, residual_ptr, M, N, stride_out, stride_rm, stride_rn), row, col,
                HAS_BIAS, ACTIVATION, HAS_RESIDUAL, TMA_OUT, HALVES,
            )  # fmt: skip


@triton.jit
def load_exponents(
    pointer, row, k_block, rows, k_blocks, stride_row, stride_k, ROWS: tl.constexpr, BLOCKS: tl.constexpr
):
    """Load the exponents ``[ROWS, BLOCKS]`` of a tile of MX codes; zeros out of bounds."""
    offs_row = row + tl.arange(0, ROWS)
    offs_k = k_block + tl.arange(0, BLOCKS)
    offsets = offs_row.to(tl.int64)[:, None] * stride_row + offs_k.to(tl.int64)[None, :] * stride_k
    return tl.load(pointer + offsets, mask=(offs_row < rows)[:, None] & (offs_k < k_blocks)[None, :], other=0)


@triton.jit
def widen_tile(x, exponents, SCALE_K: tl.constexpr):
    """Dequantize MX codes to bf16."""
    return scale_blocks(x.to(tl.float32), decode_e8m0(exponents), 1, SCALE_K).to(tl.bfloat16)


@triton.jit
def mx_matmul_kernel(
    a, b, out, a_scale_ptr, b_scale_ptr, bias_ptr, residual_ptr, M, N, K,
    stride_am, stride_ak, stride_bn, stride_bk, stride_out, stride_rm, stride_rn,
    stride_a_scale_m, stride_a_scale_k, stride_b_scale_n, stride_b_scale_k, split_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, SCALE_K: tl.constexpr, NATIVE: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    TMA: tl.constexpr, TMA_OUT: tl.constexpr, HALVES: tl.constexpr, FLATTEN: tl.constexpr,
    SWAP: tl.constexpr, SPLIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``out [M, N] = epilogue(a @ b.T)`` on MX operands; a scale is a biased exponent (uint8) for each SCALE_K of K.

    NATIVE uses tensor cores that take MX operands. Otherwise operands are dequantized to bf16 in registers, as
    ``widen_kernel`` does in memory. With SWAP the weight is the operand that the tensor core takes from registers: it
    is read once, as codes. SWAP and SPLIT: see ``scaled_matmul_kernel``.
    """
    begin(DEPENDENT)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    BLOCKS: tl.constexpr = BLOCK_K // SCALE_K
    k_blocks = tl.cdiv(K, SCALE_K)
    pieces = tiles_m * tiles_n * split_k
    for piece in tl.range(tl.program_id(0), pieces, tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n, part, first, last = piece_of_work(piece, tiles_m, tiles_n, K, split_k, BLOCK_K, GROUP_M, SPLIT)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32) if SWAP else tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(first, last, BLOCK_K):
            lhs = load_operand(a, row, k, M, K, stride_am, stride_ak, BLOCK_M, BLOCK_K, TMA)
            rhs = load_operand(b, col, k, N, K, stride_bn, stride_bk, BLOCK_N, BLOCK_K, TMA)
            a_scale = load_exponents(
                a_scale_ptr, row, k // SCALE_K, M, k_blocks, stride_a_scale_m, stride_a_scale_k, BLOCK_M, BLOCKS
            )
            b_scale = load_exponents(
                b_scale_ptr, col, k // SCALE_K, N, k_blocks, stride_b_scale_n, stride_b_scale_k, BLOCK_N, BLOCKS
            )
            if NATIVE:
                tl.static_assert(not SWAP, "the native instruction takes 128 rows of the input")
                acc = tl.dot_scaled(lhs, a_scale, A_FORMAT, rhs.T, b_scale, B_FORMAT, acc)
            else:
                acc = multiply(widen_tile(lhs, a_scale, SCALE_K), widen_tile(rhs, b_scale, SCALE_K), acc, SWAP, None)
        if SWAP:
            acc = acc.T
        if SPLIT:
            store_part(acc, out, part, row, col, M, N, tiles_m * BLOCK_M, stride_out)
        else:
            store_tile(
                acc, Target(out, bias_ptr, residual_ptr, M, N, stride_out, stride_rm, stride_rn), row, col,
                HAS_BIAS, ACTIVATION, HAS_RESIDUAL, TMA_OUT, HALVES,
            )  # fmt: skip
