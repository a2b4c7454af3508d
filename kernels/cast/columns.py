"""Casts of matrices to scales of whole columns that read each element once.

A program has one tile. It keeps the tile in registers until the amaxes of its columns are known, which takes the other
tiles of these columns. Programs are counted as they begin, and those of a strip of columns begin one after another, so
they run at the same time; unless the GPU has no room for them, as when others use it. So a program waits for a while
only. Then it leaves its tile on a list, whose tiles a second launch casts.
"""

import triton
import triton.language as tl

from tritonfp8.kernels.cast.quantize import CastSide, Encoding, load_masked, quantize_tile, spread_rows
from tritonfp8.kernels.numerics import amax_bits, magnitudes, reduce_max, within_threads
from tritonfp8.kernels.pdl import begin


@triton.jit
def _load(x_ptr, tile, tiles, strips, rows, N, EVEN: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
          R: tl.constexpr):  # fmt: skip
    """A tile, its columns, its matrix, its strip of columns in the matrix, and its place in the strip."""
    place, strip = tile % tiles, tile // tiles
    matrix, pid_n = strip // strips, strip % strips
    cols = pid_n * TILE_N + tl.arange(0, TILE_N)
    of_rows = spread_rows(place, TILE_M, R)
    mask = (of_rows < rows)[:, None] & (cols < N)[None, :]
    pointers = x_ptr + (matrix.to(tl.int64) * rows + of_rows)[:, None] * N + cols.to(tl.int64)[None, :]
    return load_masked(pointers, mask, EVEN), cols, matrix, pid_n, place


@triton.jit
def quantize_columns_kernel(
    x_ptr, q_ptr, s_ptr, amax_ptr, progress_ptr, left_ptr, tiles, strips, rows, N,
    groups_m, groups_n, stride_qm, stride_qn, stride_qg, stride_sm, stride_sn, stride_sg,
    ROWS: tl.constexpr, COLS: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, E8M0: tl.constexpr, POW2: tl.constexpr,
    TRANSPOSED: tl.constexpr, DIRECT_CAST: tl.constexpr, EVEN: tl.constexpr, LOOKS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, R: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Quantize each matrix ``[rows, N]`` of ``x``, contiguous, by a scale for each of its columns.

        amax_ptr      [matrices, N]     amax bits (int32) per column; zero before
        progress_ptr  [2 + all strips]  the programs that have begun, the tiles that are left, and of each strip the
                                        tiles whose amaxes are found; zero before
        left_ptr      [all tiles]       the tiles that are left

    LOOKS: how often a program looks whether its strip has all amaxes.
    """
    begin(DEPENDENT)
    tile = tl.atomic_add(progress_ptr, 1, sem="relaxed")
    x, cols, matrix, pid_n, place = _load(x_ptr, tile, tiles, strips, rows, N, EVEN, TILE_M, TILE_N, R)
    found = amax_ptr + matrix.to(tl.int64) * N
    bits = amax_bits(reduce_max(within_threads(magnitudes(x), R), 0), x.dtype)
    tl.atomic_max(found + cols, bits, mask=cols < N, sem="relaxed")
    # Every thread's maxima before the count says so.
    tl.debug_barrier()
    count = progress_ptr + 2 + tile // tiles
    done = tl.atomic_add(count, 1, sem="acq_rel") + 1
    looks = 0
    while (done < tiles) & (looks < LOOKS):
        done = tl.atomic_add(count, 0, sem="acquire")
        looks += 1
    tl.debug_barrier()
    if done >= tiles:
        quantize_tile(
            x, place, pid_n, place == 0, rows, N,
            CastSide(q_ptr + matrix.to(tl.int64) * stride_qg, s_ptr + matrix.to(tl.int64) * stride_sg, found,
                     groups_m, groups_n, stride_qm, stride_qn, stride_sm, stride_sn, 0, 1),
            Encoding(ROWS, COLS, QMAX, EMAX, QMAX_MANTISSA, MANTISSA_BITS, EMIN, E8M0, POW2, DIRECT_CAST, 1),
            TRANSPOSED, EVEN, R,
        )  # fmt: skip
    else:
        tl.store(left_ptr + tl.atomic_add(progress_ptr + 1, 1, sem="relaxed"), tile)


@triton.jit
def quantize_left_kernel(
    x_ptr, q_ptr, s_ptr, amax_ptr, progress_ptr, left_ptr, tiles, strips, rows, N,
    groups_m, groups_n, stride_qm, stride_qn, stride_qg, stride_sm, stride_sn, stride_sg,
    ROWS: tl.constexpr, COLS: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, E8M0: tl.constexpr, POW2: tl.constexpr,
    TRANSPOSED: tl.constexpr, DIRECT_CAST: tl.constexpr, EVEN: tl.constexpr, LOOKS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, R: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Quantize the tiles that :func:`quantize_columns_kernel` left, usually none. Its arguments."""
    begin(DEPENDENT)
    left = tl.load(progress_ptr + 1)
    for i in range(tl.program_id(0), left, tl.num_programs(0)):
        x, _, matrix, pid_n, place = _load(
            x_ptr, tl.load(left_ptr + i), tiles, strips, rows, N, EVEN, TILE_M, TILE_N, R
        )
        quantize_tile(
            x, place, pid_n, place == 0, rows, N,
            CastSide(q_ptr + matrix.to(tl.int64) * stride_qg, s_ptr + matrix.to(tl.int64) * stride_sg,
                     amax_ptr + matrix.to(tl.int64) * N,
                     groups_m, groups_n, stride_qm, stride_qn, stride_sm, stride_sn, 0, 1),
            Encoding(ROWS, COLS, QMAX, EMAX, QMAX_MANTISSA, MANTISSA_BITS, EMIN, E8M0, POW2, DIRECT_CAST, 1),
            TRANSPOSED, EVEN, R,
        )  # fmt: skip
