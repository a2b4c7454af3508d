"""The cast of matrices to scales of whole rows that also finds the amaxes of columns, for a cast to these later."""

import triton
import triton.language as tl

from tritonfp8.kernels.cast.codes import values_of_codes
from tritonfp8.kernels.cast.quantize import CastSide, Encoding, load_masked, quantize_tile
from tritonfp8.kernels.names import DISABLE_LICM
from tritonfp8.kernels.numerics import larger_or_nan, magnitudes, magnitudes_of_codes, reduce_max
from tritonfp8.kernels.pdl import begin


@triton.jit
def quantize_rows_kernel(
    x_ptr, q_ptr, s_ptr, col_ptr, sums_ptr, rows, N, tiles, chunks, stride_part, stride_xm, stride_qm, stride_sm,
    ROWS: tl.constexpr, COLS: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, E8M0: tl.constexpr, POW2: tl.constexpr,
    DIRECT_CAST: tl.constexpr, CODES: tl.constexpr, SUM: tl.constexpr, EVEN: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Quantize matrices of ``rows`` rows each, one below the other, whose rows fit in a tile.

        col_ptr  [chunks, matrices, N]  magnitudes per column, over the rows of a program; with CODES of the codes'
                                        values, as bfloat16
        sums_ptr [matrices, chunks, N]  with SUM: float32 sums of ``x`` over the rows of a program

    A program takes one of the ``chunks`` of a matrix: ``tiles`` tiles, one below the other. Each writes its own partial
    maxima, because programs end at the same time, and atomics on the same columns then wait for one another.
    """
    begin(DEPENDENT)
    matrix, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    above = matrix * rows
    cols = tl.arange(0, TILE_N)
    encoding: tl.constexpr = Encoding(
        ROWS, COLS, QMAX, EMAX, QMAX_MANTISSA, MANTISSA_BITS, EMIN, E8M0, POW2, DIRECT_CAST
    )
    highest = tl.zeros((TILE_M, TILE_N), tl.float32 if CODES else col_ptr.dtype.element_ty)
    if SUM:
        total = tl.zeros((TILE_M, TILE_N), tl.float32)
    last = tl.minimum((chunk + 1) * tiles, tl.cdiv(rows, TILE_M))
    for tile in tl.range(chunk * tiles, last, num_stages=STAGES, disable_licm=DISABLE_LICM):
        within = tile * TILE_M + tl.arange(0, TILE_M)
        mask = (within < rows)[:, None] & (cols < N)[None, :]
        pointers = x_ptr + (above + within).to(tl.int64)[:, None] * stride_xm + cols[None, :]
        x = load_masked(pointers, mask, EVEN)
        if not CODES:
            highest = tl.maximum(highest, magnitudes(x))
        if SUM:
            total += x.to(tl.float32)
        q, scale = quantize_tile(
            x, tile, 0, tile == 0, rows, N,
            CastSide(q_ptr + above.to(tl.int64) * stride_qm, s_ptr + above.to(tl.int64) * stride_sm, s_ptr,
                     rows, 1, stride_qm, 1, stride_sm, 1),
            encoding, False, EVEN, 1,
        )  # fmt: skip
        if CODES:
            highest = larger_or_nan(highest, tl.abs(values_of_codes(q, scale, encoding, 1)))
    if CODES:
        highest = magnitudes_of_codes(highest)
    found = col_ptr + chunk.to(tl.int64) * stride_part + matrix.to(tl.int64) * N
    tl.store(found + cols, reduce_max(highest, 0), mask=cols < N)
    if SUM:
        tl.store(sums_ptr + tl.program_id(0).to(tl.int64) * N + cols, tl.sum(total, 0), mask=cols < N)
