"""Casts to scales of whole rows that also find the amaxes of columns, for a cast to these later.

Each program writes its own partial maxima: programs end at the same time, and atomics on the same columns then wait for
one another.
"""

import triton
import triton.language as tl

from tritonfp8.kernels.cast.codes import values_of_codes
from tritonfp8.kernels.cast.group_rows import Source, load_rows, rows_of, swiglu
from tritonfp8.kernels.cast.quantize import CastSide, Encoding, load_masked, quantize_tile
from tritonfp8.kernels.group_table import FIELDS, bounds_of
from tritonfp8.kernels.names import DISABLE_LICM
from tritonfp8.kernels.numerics import amax_bits, larger_or_nan, magnitudes, magnitudes_of_codes, reduce_max
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

    A program takes one of the ``chunks`` of a matrix: ``tiles`` tiles, one below the other.
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


@triton.jit
def quantize_group_rows_kernel(
    x_ptr, picked_ptr, factors_ptr, table_ptr, q_ptr, s_ptr, parts_ptr,
    blocks, entries, N, stride_xm, stride_xn, stride_qm, stride_sm,
    ROWS: tl.constexpr, COLS: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, E8M0: tl.constexpr, POW2: tl.constexpr,
    DIRECT_CAST: tl.constexpr, SOURCE: tl.constexpr, EVEN: tl.constexpr, ALIGNMENT: tl.constexpr, EACH: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Quantize rows that fit in a tile, and find the maxima of the values of their codes by group and column.

        parts_ptr  [blocks * EACH, N]  magnitudes as bfloat16, over the rows of a program

    A program takes one of the EACH parts of the ALIGNMENT rows of an aligned tile of the table. EVEN: a tile is as wide
    as the rows. SOURCE may be ``swiglu``, too: rows of ``x`` are then 2 N wide, and SwiGLU of them is quantized.
    """
    begin(DEPENDENT)
    source = Source(x_ptr, picked_ptr, factors_ptr, stride_xm, stride_xn)
    part = tl.program_id(0) % EACH
    cols = tl.arange(0, TILE_N)
    encoding: tl.constexpr = Encoding(
        ROWS, COLS, QMAX, EMAX, QMAX_MANTISSA, MANTISSA_BITS, EMIN, E8M0, POW2, DIRECT_CAST
    )
    tiles = tl.load(table_ptr + entries * FIELDS)
    # More than one tile only where some rows belong to no group.
    for tile in range(tl.program_id(0) // EACH, tiles, blocks):
        group, start, count, place = rows_of(tile, table_ptr, 0, False, ALIGNMENT)
        side = CastSide(
            q_ptr + start.to(tl.int64) * stride_qm, s_ptr + start.to(tl.int64) * stride_sm, s_ptr,
            count, 1, stride_qm, 1, stride_sm, 1,
        )  # fmt: skip
        highest = tl.zeros((TILE_M, TILE_N), tl.float32)
        first = (place * EACH + part) * (ALIGNMENT // EACH // TILE_M)
        last = tl.minimum(first + ALIGNMENT // EACH // TILE_M, tl.cdiv(count, TILE_M))
        for rows in tl.range(first, last, num_stages=STAGES, disable_licm=DISABLE_LICM):
            within = rows * TILE_M + tl.arange(0, TILE_M)
            mask = (within < count)[:, None]
            if not EVEN:
                mask = mask & (cols < N)[None, :]
            if SOURCE == "swiglu":
                gate = load_rows(source, start, count, within, cols, mask, "rows", False)
                x = swiglu(gate, load_rows(source, start, count, within, cols + N, mask, "rows", False))
            else:
                x = load_rows(source, start, count, within, cols, mask, SOURCE, False)
            q, scale = quantize_tile(x, rows, 0, rows == 0, count, N, side, encoding, False, False, 1)
            highest = larger_or_nan(highest, tl.abs(values_of_codes(q, scale, encoding, 1)))
        if tile < blocks:
            # By the place of the tile, whatever the order of the table is.
            at = (start // ALIGNMENT + group + place) * EACH + part
            found = reduce_max(magnitudes_of_codes(highest), 0)
            tl.store(parts_ptr + at.to(tl.int64) * N + cols, found, mask=cols < N)


@triton.jit
def group_maxima_kernel(
    parts_ptr, offsets_ptr, amax_ptr, tokens, groups, N,
    ALIGNMENT: tl.constexpr, EACH: tl.constexpr, TILE_P: tl.constexpr, TILE_N: tl.constexpr, SIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """amax bits (int32) ``[groups, N]`` from the partial maxima of :func:`quantize_group_rows_kernel`."""
    begin(DEPENDENT)
    tiles_n = tl.cdiv(N, TILE_N)
    group = tl.program_id(0) // tiles_n
    cols = tl.program_id(0) % tiles_n * TILE_N + tl.arange(0, TILE_N)
    start, end = bounds_of(offsets_ptr, group, tokens, groups, SIZE)
    first = (start // ALIGNMENT + group) * EACH
    parts = tl.cdiv(end - start, ALIGNMENT) * EACH
    highest = tl.zeros((TILE_P, TILE_N), parts_ptr.dtype.element_ty)
    for done in range(0, parts, TILE_P):
        part = done + tl.arange(0, TILE_P)
        pointers = parts_ptr + (first + part).to(tl.int64)[:, None] * N + cols[None, :]
        found = tl.load(pointers, mask=(part < parts)[:, None] & (cols < N)[None, :], other=0)
        highest = tl.maximum(highest, found)
    # 16 bits hold the values of codes.
    bits = amax_bits(reduce_max(highest, 0), tl.bfloat16)
    tl.store(amax_ptr + group.to(tl.int64) * N + cols, bits, mask=cols < N)
