"""Dequantize MX codes to bf16, for a GEMM in bf16 where no tensor core takes MX operands."""

import triton
import triton.language as tl

from tritonfp8.kernels.numerics import decode_e8m0
from tritonfp8.kernels.pdl import begin


@triton.jit
def widen_kernel(
    q_ptr, s_ptr, out_ptr, M, K, stride_qm, stride_qk, stride_sm, stride_sk, stride_out,
    SCALE_K: tl.constexpr, BLOCKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``out [M, K] = q * 2^(s - 127)``, rounded once; a scale for each SCALE_K of K. A program takes BLOCKS scales.

    Blocks are counted along rows, so that a program reads and writes memory without gaps where the rows have none.
    """
    begin(DEPENDENT)
    k_blocks = tl.cdiv(K, SCALE_K)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    # A division of 32-bit numbers; offsets of elements take 64.
    row, k_block = block // k_blocks, block % k_blocks
    scale_offsets = row.to(tl.int64) * stride_sm + k_block.to(tl.int64) * stride_sk
    exponents = tl.load(s_ptr + scale_offsets, mask=row < M, other=0)
    cols = k_block[:, None] * SCALE_K + tl.arange(0, SCALE_K)[None, :]
    mask = (row < M)[:, None] & (cols < K)
    offsets = row.to(tl.int64)[:, None] * stride_qm + cols.to(tl.int64) * stride_qk
    codes = tl.load(q_ptr + offsets, mask=mask, other=0.0)
    out = (codes.to(tl.float32) * decode_e8m0(exponents)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row.to(tl.int64)[:, None] * stride_out + cols, out, mask=mask)
