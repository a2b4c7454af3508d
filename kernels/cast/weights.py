"""Casts of several matrices in one launch, to transposes with a scale a row: of a block's weights, for ``grad_input``.

At small sizes a launch takes longer than its kernel. A program finds its matrix by its number: the tiles of the first
matrix come first, then the tiles of the second.

With CODES a transpose is made from the codes of its matrix, which are made again from values by a known scale a row.
"""

import triton
import triton.language as tl

from tritonfp8.kernels.cast.codes import values_by_rows
from tritonfp8.kernels.cast.quantize import CastSide, Encoding, load_masked, quantize_tile, spread_rows, tile_index
from tritonfp8.kernels.numerics import larger_or_nan, magnitude_bits, magnitudes, reduce_max, within_threads
from tritonfp8.kernels.pdl import begin

# Matrices that a kernel takes.
MOST: tl.constexpr = tl.constexpr(8)


@triton.jit
def _find(
    program, pointers, sizes, COUNT: tl.constexpr, CHUNK: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr
):
    """What this program reads and writes.

    Returns:
        The matrix, the scales of its rows, and the codes and scales of its transpose; its rows and columns; the number
        of its tile; the index of the first partial maximum of its columns.
    """
    for i in tl.static_range(COUNT):
        m, n = sizes[i]
        if i == 0:
            x_ptr, f_ptr, q_ptr, s_ptr = pointers[i]
            M, N = m, n
            tile, part, end, parts = program, 0, 0, 0
        elif program >= end:
            x_ptr, f_ptr, q_ptr, s_ptr = pointers[i]
            M, N = m, n
            tile = program - end
            part = parts
        end += tl.cdiv(m, TILE_M) * tl.cdiv(n, TILE_N)
        parts += tl.cdiv(m, CHUNK) * n
    return x_ptr, f_ptr, q_ptr, s_ptr, M, N, tile, part


@triton.jit
def amax_of_weights_kernel(
    x0, x1, x2, x3, x4, x5, x6, x7, f0, f1, f2, f3, f4, f5, f6, f7, q_ptr, parts_ptr,
    M0, N0, M1, N1, M2, N2, M3, N3, M4, N4, M5, N5, M6, N6, M7, N7,
    QMAX: tl.constexpr, MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr,
    COUNT: tl.constexpr, CODES: tl.constexpr, DIRECT_CAST: tl.constexpr, EVEN: tl.constexpr, CHUNK: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, R: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Magnitudes of partial maxima of columns: of each matrix ``[cdiv(M, CHUNK), N]``, one behind the other.

    With CODES they are float32 bits of values of codes, whose dtype is read from ``q_ptr``. A program keeps the maxima
    of every R rows: values of codes are float32, and a whole tile of maxima would take too many registers.
    """
    begin(DEPENDENT)
    pointers = (
        (x0, f0, x0, x0), (x1, f1, x1, x1), (x2, f2, x2, x2), (x3, f3, x3, x3),
        (x4, f4, x4, x4), (x5, f5, x5, x5), (x6, f6, x6, x6), (x7, f7, x7, x7),
    )  # fmt: skip
    sizes = ((M0, N0), (M1, N1), (M2, N2), (M3, N3), (M4, N4), (M5, N5), (M6, N6), (M7, N7))
    x_ptr, f_ptr, _, _, M, N, tile, part = _find(tl.program_id(0), pointers, sizes, COUNT, CHUNK, CHUNK, TILE_N)
    strips = tl.cdiv(N, TILE_N)
    chunk = tile // strips
    cols = tile % strips * TILE_N + tl.arange(0, TILE_N)
    # Values of codes stay floats, whose maximum takes one instruction. Else zeros of the dtype of the magnitudes.
    MAXIMA: tl.constexpr = tl.float32 if CODES else parts_ptr.dtype.element_ty
    highest = tl.zeros((TILE_M // R, TILE_N), MAXIMA)
    for first in range(0, CHUNK, TILE_M):
        rows = chunk * CHUNK + first + tl.arange(0, TILE_M)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        x = load_masked(x_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :], mask, EVEN)
        if CODES:
            DTYPE: tl.constexpr = q_ptr.dtype.element_ty
            values = values_by_rows(x, f_ptr, rows, M, QMAX, MANTISSA_BITS, EMIN, DIRECT_CAST, DTYPE)
            highest = larger_or_nan(highest, within_threads(tl.abs(values), R))
        else:
            highest = tl.maximum(highest, within_threads(magnitudes(x), R))
    found = reduce_max(highest, 0)
    tl.store(parts_ptr + part + chunk * N + cols, magnitude_bits(found) if CODES else found, mask=cols < N)


@triton.jit
def quantize_weights_kernel(
    x0, x1, x2, x3, x4, x5, x6, x7, f0, f1, f2, f3, f4, f5, f6, f7,
    q0, q1, q2, q3, q4, q5, q6, q7, s0, s1, s2, s3, s4, s5, s6, s7, parts_ptr,
    M0, N0, M1, N1, M2, N2, M3, N3, M4, N4, M5, N5, M6, N6, M7, N7,
    ROWS: tl.constexpr, COLS: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, E8M0: tl.constexpr, POW2: tl.constexpr, PARTS: tl.constexpr,
    COUNT: tl.constexpr, CODES: tl.constexpr, DIRECT_CAST: tl.constexpr, EVEN: tl.constexpr, CHUNK: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Quantize the transpose of each ``x [M, N]``, contiguous, by its partial maxima: codes ``[N, M]``, scales ``[N]``.

    PARTS is how many partial maxima are reduced in one step.
    """
    begin(DEPENDENT)
    pointers = (
        (x0, f0, q0, s0), (x1, f1, q1, s1), (x2, f2, q2, s2), (x3, f3, q3, s3),
        (x4, f4, q4, s4), (x5, f5, q5, s5), (x6, f6, q6, s6), (x7, f7, q7, s7),
    )  # fmt: skip
    sizes = ((M0, N0), (M1, N1), (M2, N2), (M3, N3), (M4, N4), (M5, N5), (M6, N6), (M7, N7))
    x_ptr, f_ptr, q_ptr, s_ptr, M, N, tile, part = _find(
        tl.program_id(0), pointers, sizes, COUNT, CHUNK, TILE_M, TILE_N
    )
    pid_m, pid_n = tile_index(tile, M, N, TILE_M, TILE_N, GROUP)
    rows = spread_rows(pid_m, TILE_M, R)
    cols = pid_n * TILE_N + tl.arange(0, TILE_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = load_masked(x_ptr + rows.to(tl.int64)[:, None] * N + cols[None, :], mask, EVEN)
    if CODES:
        # Of the format of the result.
        x = values_by_rows(x, f_ptr, rows, M, QMAX, MANTISSA_BITS, EMIN, DIRECT_CAST, q_ptr.dtype.element_ty)
    quantize_tile(
        x, pid_m, pid_n, pid_m == 0, M, N,
        CastSide(q_ptr, s_ptr, parts_ptr + part, 1, N, 1, M, N, 1, N, 1, tl.cdiv(M, CHUNK), N),
        Encoding(ROWS, COLS, QMAX, EMAX, QMAX_MANTISSA, MANTISSA_BITS, EMIN, E8M0, POW2, DIRECT_CAST, PARTS),
        True, EVEN, R,
    )  # fmt: skip
