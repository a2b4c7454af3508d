"""Casts of matrices to scales of whole columns: both passes in one launch, so that the second reads from the cache."""

import triton
import triton.language as tl

from tritonfp8.kernels.cast.quantize import load_masked, quantize_tile, spread_rows
from tritonfp8.kernels.moe.casts import within_threads
from tritonfp8.kernels.numerics import amax_bits, magnitudes, reduce_max
from tritonfp8.kernels.pdl import begin


@triton.jit
def quantize_columns_kernel(
    x_ptr, q_ptr, s_ptr, amax_ptr, progress_ptr, chunks, lag, rows, N,
    groups_m, groups_n, stride_qm, stride_qn, stride_qg, stride_sm, stride_sn, stride_sg,
    ROWS: tl.constexpr, COLS: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, E8M0: tl.constexpr, POW2: tl.constexpr,
    TRANSPOSED: tl.constexpr, DIRECT_CAST: tl.constexpr, EVEN: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, STRIPS: tl.constexpr, R: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Quantize each matrix ``[rows, N]`` of ``x``, contiguous, by a scale for each of its columns.

        amax_ptr      [matrices, N]  amax bits (int32) per column; zero before
        progress_ptr  [1 + chunks]   the programs that have begun, then the tiles of each chunk whose amaxes are
                                     found; zero before

    A chunk is STRIPS strips of TILE_N columns of one matrix. In round i programs find the amaxes of chunk i and cast
    chunk ``i - lag``, which the cache still has. A program takes its work in the order in which programs begin, and no
    program that finds amaxes waits, so those for which a cast waits have begun and will end.
    """
    begin(DEPENDENT)
    tiles = tl.cdiv(rows, TILE_M) * STRIPS
    turn = tl.atomic_add(progress_ptr, 1, sem="relaxed")
    within = turn % (2 * tiles)
    casts = within >= tiles
    chunk = turn // (2 * tiles) - tl.where(casts, lag, 0)
    if (chunk >= 0) & (chunk < chunks):
        tile = within % tiles
        strips = tl.cdiv(N, TILE_N * STRIPS)
        matrix = chunk // strips
        place = tile // STRIPS
        pid_n = chunk % strips * STRIPS + tile % STRIPS
        cols = pid_n * TILE_N + tl.arange(0, TILE_N)
        of_rows = spread_rows(place, TILE_M, R)
        mask = (of_rows < rows)[:, None] & (cols < N)[None, :]
        x = load_masked(
            x_ptr + (matrix.to(tl.int64) * rows + of_rows)[:, None] * N + cols.to(tl.int64)[None, :], mask, EVEN
        )
        found = amax_ptr + matrix.to(tl.int64) * N
        if casts:
            while tl.atomic_add(progress_ptr + 1 + chunk, 0, sem="acquire") < tiles:
                pass
            tl.debug_barrier()
            quantize_tile(
                x, place, pid_n, place == 0, rows, N,
                q_ptr + matrix.to(tl.int64) * stride_qg, s_ptr + matrix.to(tl.int64) * stride_sg, found,
                groups_m, groups_n, stride_qm, stride_qn, stride_sm, stride_sn, 0, 1, 1, 0,
                ROWS, COLS, QMAX, EMAX, QMAX_MANTISSA, MANTISSA_BITS, EMIN, E8M0, POW2, 1,
                DIRECT_CAST, TRANSPOSED, EVEN, R,
            )  # fmt: skip
        else:
            bits = amax_bits(reduce_max(within_threads(magnitudes(x), R), 0), x.dtype)
            tl.atomic_max(found + cols, bits, mask=cols < N, sem="relaxed")
            # Every thread's maxima before the count says so.
            tl.debug_barrier()
            tl.atomic_add(progress_ptr + 1 + chunk, 1, sem="release")
