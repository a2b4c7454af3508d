"""A GEMM for each group in one launch, in plain Triton for any device: groups of rows, or groups of columns.

rows      out[rows of g] = a[rows of g] @ b[g].T       ``a [tokens, K]``, ``b [groups, N, K]``
columns   out[g] = a[:, columns of g] @ b[:, columns of g].T
"""

import triton
import triton.language as tl

from tritonfp8.kernels.gemm.block_scaled import load_exponents, scale_product, widen_tile
from tritonfp8.kernels.gemm.tiles import load_operand, multiply, tile_index
from tritonfp8.kernels.group_table import FIELDS
from tritonfp8.kernels.pdl import begin


@triton.jit
def _find(piece, table_ptr, count, M, tiles_n, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr, COLUMNS: tl.constexpr):
    """Group, its start and end, first row of the tile and the end of its rows, index of its tile of columns."""
    if COLUMNS:
        tiles_m = tl.cdiv(M, BLOCK_M)
        per_group = tiles_m * tiles_n
        at = table_ptr + piece // per_group * FIELDS
        tile_m, tile_n = tile_index(piece % per_group, tiles_m, tiles_n, GROUP_M)
        return tl.load(at), tl.load(at + 3), tl.load(at + 2), tile_m * BLOCK_M, M, tile_n
    else:
        tile, tile_n = tile_index(piece, count, tiles_n, GROUP_M)
        at = table_ptr + tile * FIELDS
        end = tl.load(at + 2)
        return tl.load(at), tl.load(at + 3), end, tl.load(at + 1), end, tile_n


@triton.jit
def grouped_matmul_kernel(
    a_ptr, b_ptr, out_ptr, a_scale_ptr, b_scale_ptr, bias_ptr, table_ptr, entries, groups, M, N, K,
    stride_am, stride_ak, stride_bg, stride_bn, stride_bk, stride_og, stride_om,
    stride_asm, stride_ask, stride_bsg, stride_bsn, stride_bsk,
    SCALES: tl.constexpr, COLUMNS: tl.constexpr, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, SCALE_K: tl.constexpr,
    PROMOTE_EVERY: tl.constexpr, A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, NATIVE: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr, ALIGNMENT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Walk over the output tiles of all groups.

    SCALES is the family of the operands' scales (:func:`tritonfp8.specs.matmul_family`), or None. Scales that leave K
    whole are found by A_ROWS = 1 (a scale for each row) or -1 (one for each group), and by strides of ``b``. Of groups
    of columns, quantized ones begin at multiples of ALIGNMENT, with zeros after them; others (SCALES None) follow each
    other. Tiles of no group are zero. ``entries`` are those of the table before its number of tiles.
    """
    begin(DEPENDENT)
    tiles_n = tl.cdiv(N, BLOCK_N)
    count = groups if COLUMNS else tl.load(table_ptr + entries * FIELDS)
    pieces = groups * tl.cdiv(M, BLOCK_M) * tiles_n if COLUMNS else count * tiles_n
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        group, start, end, row, row_end, tile_n = _find(piece, table_ptr, count, M, tiles_n, BLOCK_M, GROUP_M, COLUMNS)
        col = tile_n * BLOCK_N
        rows = row + tl.arange(0, BLOCK_M)
        cols = col + tl.arange(0, BLOCK_N)
        is_group = group < groups
        b_group = b_ptr + tl.where(is_group, group, 0).to(tl.int64) * stride_bg
        b_scales = b_scale_ptr
        if SCALES is not None:
            b_scales = b_scale_ptr + tl.where(is_group, group, 0).to(tl.int64) * stride_bsg
        first = 0
        last = tl.where(is_group, K, 0)
        limit = K
        if COLUMNS:
            if SCALES is None:
                first = start
                last = end
                limit = end
            else:
                first = (start // ALIGNMENT + group) * ALIGNMENT
                last = first + end - start
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(first, last, BLOCK_K):
            lhs = load_operand(a_ptr, row, k, row_end, limit, stride_am, stride_ak, BLOCK_M, BLOCK_K, False)
            rhs = load_operand(b_group, col, k, N, limit, stride_bn, stride_bk, BLOCK_N, BLOCK_K, False)
            if SCALES is None:
                acc = tl.dot(lhs, rhs.T, acc, input_precision="ieee")
            elif SCALES == "epilogue":
                acc = multiply(lhs, rhs, acc, False, PROMOTE_EVERY)
            elif SCALES == "blockwise":
                at = k // SCALE_K
                a_scales = a_scale_ptr + at.to(tl.int64) * stride_ask
                if A_ROWS == 1:
                    a_scale = tl.load(a_scales + rows.to(tl.int64) * stride_asm, mask=rows < row_end, other=0.0)
                else:
                    a_scale = tl.load(a_scales + (row // A_ROWS).to(tl.int64) * stride_asm)
                b_step = b_scales + at.to(tl.int64) * stride_bsk
                if B_ROWS == 1:
                    b_scale = tl.load(b_step + cols.to(tl.int64) * stride_bsn, mask=cols < N, other=0.0)
                else:
                    b_scale = tl.load(b_step + (col // B_ROWS).to(tl.int64) * stride_bsn)
                acc += scale_product(multiply(lhs, rhs, None, False, None), a_scale, b_scale, A_ROWS, B_ROWS)
            else:
                BLOCKS: tl.constexpr = BLOCK_K // SCALE_K
                blocks = tl.cdiv(limit, SCALE_K)
                a_scale = load_exponents(
                    a_scale_ptr, row, k // SCALE_K, row_end, blocks, stride_asm, stride_ask, BLOCK_M, BLOCKS
                )
                b_scale = load_exponents(
                    b_scales, col, k // SCALE_K, N, blocks, stride_bsn, stride_bsk, BLOCK_N, BLOCKS
                )
                if NATIVE:
                    acc = tl.dot_scaled(lhs, a_scale, A_FORMAT, rhs.T, b_scale, B_FORMAT, acc)
                else:
                    acc = multiply(
                        widen_tile(lhs, a_scale, SCALE_K), widen_tile(rhs, b_scale, SCALE_K), acc, False, None
                    )
        if SCALES == "epilogue":
            # One scale after the other: their product may over- or underflow float32 even if the result does not.
            if COLUMNS:
                a_scales = a_scale_ptr + group.to(tl.int64) * stride_ask + rows.to(tl.int64) * stride_asm
                b_scales += group.to(tl.int64) * stride_bsk
                acc *= tl.load(a_scales, mask=rows < M, other=0.0)[:, None]
            elif A_ROWS == 1:
                acc *= tl.load(a_scale_ptr + rows.to(tl.int64) * stride_asm, mask=rows < row_end, other=0.0)[:, None]
            else:
                acc *= tl.load(a_scale_ptr + group.to(tl.int64) * stride_asm, mask=is_group, other=0.0)
            acc *= tl.load(b_scales + cols.to(tl.int64) * stride_bsn, mask=cols < N, other=0.0)[None, :]
        if HAS_BIAS:
            bias = tl.load(bias_ptr + tl.where(is_group, group, 0) * N + cols, mask=cols < N, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        # Whatever was read for them, rows of no group are zero, and so is the gradient of an empty group.
        acc = tl.where(is_group & (end > start), acc, 0.0)
        out = out_ptr + rows.to(tl.int64)[:, None] * stride_om + cols[None, :]
        if COLUMNS:
            out += group.to(tl.int64) * stride_og
        mask = (rows < row_end)[:, None] & (cols < N)[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)
