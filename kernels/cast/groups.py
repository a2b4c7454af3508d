"""Casts of groups: each group of rows, or each matrix, is quantized as if it were alone."""

import triton
import triton.language as tl

from tritonfp8.kernels.cast.codes import amax_of_codes, values_by_scales, values_of_codes
from tritonfp8.kernels.cast.group_rows import (
    Source,
    grad_of_gate,
    load_rows,
    of_group,
    rows_of,
    swiglu,
)
from tritonfp8.kernels.cast.quantize import (
    CastSide,
    Encoding,
    given_amax,
    quantize_tile,
    spread_rows,
    store_tile,
    tile_index,
)
from tritonfp8.kernels.group_table import FIELDS, bounds_of
from tritonfp8.kernels.numerics import (
    amax_bits,
    larger_or_nan,
    magnitudes,
    magnitudes_of_codes,
    reduce_max,
    within_threads,
)
from tritonfp8.kernels.pdl import begin


@triton.jit
def _raise_maxima(
    highest, col_ptr, whole_ptr, group, cols, mask, N, DTYPE: tl.constexpr, COL: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Raise the maxima of a group by the maxima of some of its rows: magnitudes of DTYPE, or floats of codes."""
    found = reduce_max(highest, 0)
    if found.dtype.is_floating():
        found = magnitudes_of_codes(found)
    if COL:
        tl.atomic_max(col_ptr + group.to(tl.int64) * N + cols, amax_bits(found, DTYPE), mask=mask, sem="relaxed")
    if WHOLE:
        tl.atomic_max(whole_ptr + group, amax_bits(reduce_max(found, 0), DTYPE), sem="relaxed")


@triton.jit
def group_amax_kernel(
    x_ptr, picked_ptr, factors_ptr, table_ptr, row_ptr, col_ptr, whole_ptr,
    blocks, entries, rows, N, stride_xm, stride_xn, stride_part,
    ROW: tl.constexpr, COL: tl.constexpr, WHOLE: tl.constexpr, MATRICES: tl.constexpr, ALIGNMENT: tl.constexpr,
    SOURCE: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, R: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Maxima of blocks that no tile holds whole.

        row_ptr    [cdiv(N, TILE_N), rows of x]  magnitudes per row, over the columns of a tile
        col_ptr    [groups, N]                   amax bits (int32) per column of a group; zero before
        whole_ptr  [groups]                      amax bits of a group; zero before

    A program takes the ALIGNMENT rows of a tile of the table, TILE_M at a time. Programs of one group raise its maxima
    by atomics: the maximum of integers is the same in every order. Codes have a scale a row, their factor.
    """
    begin(DEPENDENT)
    CODES: tl.constexpr = SOURCE == "codes"
    # 16 bits hold the values of codes.
    DTYPE: tl.constexpr = tl.bfloat16 if CODES else x_ptr.dtype.element_ty
    source = Source(x_ptr, picked_ptr, factors_ptr, stride_xm, stride_xn)
    L: tl.constexpr = TILE_M // R
    pid_m, pid_n = tile_index(tl.program_id(0), blocks * ALIGNMENT, N, ALIGNMENT, TILE_N, 1)
    cols = pid_n * TILE_N + tl.arange(0, TILE_N)
    tiles = blocks if MATRICES else tl.load(table_ptr + entries * FIELDS)
    # More than one tile only where some rows belong to no group.
    for tile in range(pid_m, tiles, blocks):
        group, start, count, place = rows_of(tile, table_ptr, rows, MATRICES, ALIGNMENT)
        first = place * ALIGNMENT
        row_maxima = row_ptr + pid_n.to(tl.int64) * stride_part + start
        # Zeros of the dtype of the magnitudes. Values of codes stay floats, whose maximum takes one instruction.
        highest = tl.zeros((L, TILE_N), tl.float32 if CODES else magnitudes(tl.zeros((1,), DTYPE)).dtype)
        for part in range(first, tl.minimum(first + ALIGNMENT, count), TILE_M):
            within = part + tl.arange(0, TILE_M)
            mask = (within < count)[:, None] & (cols < N)[None, :]
            x = load_rows(source, start, count, within, cols, mask, SOURCE, False)
            if CODES:
                scale = tl.load(factors_ptr + start + within, mask=within < count, other=0.0)
                values = tl.abs(x.to(tl.float32) * scale[:, None])
                highest = larger_or_nan(highest, within_threads(values, R))
            else:
                values = magnitudes(x)
                if ROW:
                    tl.store(row_maxima + within, reduce_max(values, 1), mask=within < count)
                if COL or WHOLE:
                    highest = tl.maximum(highest, within_threads(values, R))
        if (COL or WHOLE) and (tile < blocks) & (count > first):
            _raise_maxima(highest, col_ptr, whole_ptr, group, cols, cols < N, N, DTYPE, COL, WHOLE)


@triton.jit
def group_swiglu_kernel(
    grad_ptr, gate_up_ptr, out_ptr, table_ptr, row_ptr, col_ptr, whole_ptr,
    blocks, entries, F, stride_gm, stride_gn, stride_um, stride_un, stride_part,
    ROW: tl.constexpr, COL: tl.constexpr, WHOLE: tl.constexpr, BACKWARD: tl.constexpr, ALIGNMENT: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, R: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """:func:`swiglu_kernel` on rows of groups, and the maxima of ``out`` as :func:`group_amax_kernel` finds them."""
    begin(DEPENDENT)
    L: tl.constexpr = TILE_M // R
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    N = 2 * F if BACKWARD else F
    strips = tl.cdiv(F, TILE_N)
    pid_m, pid_n = tile_index(tl.program_id(0), blocks * ALIGNMENT, F, ALIGNMENT, TILE_N, 1)
    cols = pid_n * TILE_N + tl.arange(0, TILE_N)
    at = cols[None, :]
    tiles = tl.load(table_ptr + entries * FIELDS)
    for tile in range(pid_m, tiles, blocks):
        group, start, count, place = rows_of(tile, table_ptr, 0, False, ALIGNMENT)
        first = place * ALIGNMENT
        row_maxima = row_ptr + pid_n.to(tl.int64) * stride_part + start
        highest = tl.zeros((L, TILE_N), magnitudes(tl.zeros((1,), DTYPE)).dtype)
        # Of the gradient of what is multiplied by the gate.
        highest_up = highest
        for part in range(first, tl.minimum(first + ALIGNMENT, count), TILE_M):
            within = part + tl.arange(0, TILE_M)
            exist = within < count
            mask = exist[:, None] & (cols < F)[None, :]
            row = (start + within)[:, None]
            gates = gate_up_ptr + row.to(tl.int64) * stride_um
            gate = tl.load(gates + at.to(tl.int64) * stride_un, mask=mask, other=0.0)
            up = tl.load(gates + (at + F).to(tl.int64) * stride_un, mask=mask, other=0.0)
            out = out_ptr + row.to(tl.int64) * N + at
            if BACKWARD:
                grad = tl.load(
                    grad_ptr + row.to(tl.int64) * stride_gm + at.to(tl.int64) * stride_gn, mask=mask, other=0.0
                )
                of_up = swiglu(gate, grad)
                tl.store(out + F, of_up, mask=mask)
                values = magnitudes(of_up)
                if ROW:
                    tl.store(row_maxima + strips.to(tl.int64) * stride_part + within, reduce_max(values, 1), mask=exist)
                if COL or WHOLE:
                    highest_up = tl.maximum(highest_up, within_threads(values, R))
                x = grad_of_gate(grad, gate, up)
            else:
                x = swiglu(gate, up)
            tl.store(out, x, mask=mask)
            values = magnitudes(x)
            if ROW:
                tl.store(row_maxima + within, reduce_max(values, 1), mask=exist)
            if COL or WHOLE:
                highest = tl.maximum(highest, within_threads(values, R))
        if (COL or WHOLE) and (tile < blocks) & (count > first):
            _raise_maxima(highest, col_ptr, whole_ptr, group, cols, cols < F, N, DTYPE, COL, WHOLE)
            if BACKWARD:
                _raise_maxima(highest_up, col_ptr + F, whole_ptr, group, cols, cols < F, N, DTYPE, COL, WHOLE)


@triton.jit
def quantize_groups_kernel(
    x_ptr, picked_ptr, factors_ptr, table_ptr, q_ptr, s_ptr, amax_ptr, qt_ptr, st_ptr, amax_t_ptr, sums_ptr,
    blocks, entries, groups, rows, N, stride_xm, stride_xn,
    groups_m, groups_n, stride_qm, stride_qn, stride_sm, stride_sn, stride_sg, stride_am, stride_an, stride_ag,
    groups_tm, groups_tn, stride_qtm, stride_qtn, stride_qtg, stride_stm, stride_stn, stride_stg,
    stride_atm, stride_atn, stride_atg,
    ROWS: tl.constexpr, COLS: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr,
    E8M0: tl.constexpr, POW2: tl.constexpr, PARTS: tl.constexpr,
    ROWS_T: tl.constexpr, COLS_T: tl.constexpr, QMAX_T: tl.constexpr, EMAX_T: tl.constexpr,
    QMAX_MANTISSA_T: tl.constexpr, MANTISSA_BITS_T: tl.constexpr, EMIN_T: tl.constexpr,
    E8M0_T: tl.constexpr, POW2_T: tl.constexpr, PARTS_T: tl.constexpr,
    NORMAL: tl.constexpr, TRANSPOSED: tl.constexpr, DIRECT_CAST: tl.constexpr, MATRICES: tl.constexpr,
    SOURCE: tl.constexpr, CODES: tl.constexpr, SUM: tl.constexpr, EVEN: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Quantize each group of rows of ``x``, its transpose, or both, in one pass over ``x``.

    With CODES the transpose is quantized from the codes of the other result, which the tile has in registers. Without
    NORMAL, ``x`` has these codes, or the values that they are made of, and the scales are at ``s_ptr``.

    All strides and blocks are in the coordinates of ``x``. With MATRICES each group has ``rows`` rows. Else the table
    of aligned tiles says which rows a tile has, and the transposed result is a tensor of groups of columns: tile t
    writes its t-th TILE_M columns, zeros after the last token of a group. A block that does not fit in a tile takes its
    amax from ``amax_ptr``, by the strides of its group. EVEN: no tile reaches beyond the columns of ``x``, nor beyond
    the rows of a matrix. SUM also writes ``sums_ptr [blocks, N]``, float32: the sum over the rows of a tile.
    """
    begin(DEPENDENT)
    source = Source(x_ptr, picked_ptr, factors_ptr, stride_xm, stride_xn)
    pid_m, pid_n = tile_index(tl.num_programs(0) - 1 - tl.program_id(0), blocks * TILE_M, N, TILE_M, TILE_N, GROUP)
    group, start, count, place = rows_of(pid_m, table_ptr, rows, MATRICES, TILE_M)
    within = spread_rows(place, TILE_M, R)
    cols = pid_n * TILE_N + tl.arange(0, TILE_N)
    mask = (within < count)[:, None]
    if not EVEN:
        mask = mask & (cols < N)[None, :]
    WHOLE: tl.constexpr = EVEN and MATRICES
    side = CastSide(
        q_ptr + start.to(tl.int64) * stride_qm,
        of_group(s_ptr, group, start, stride_sm, stride_sg, ROWS, MATRICES),
        of_group(amax_ptr, group, start, stride_am, stride_ag, ROWS, MATRICES),
        count if ROWS == 1 and not MATRICES else groups_m,
        groups_n, stride_qm, stride_qn, stride_sm, stride_sn, stride_am, stride_an,
    )  # fmt: skip
    encoding: tl.constexpr = Encoding(
        ROWS, COLS, QMAX, EMAX, QMAX_MANTISSA, MANTISSA_BITS, EMIN, E8M0, POW2, DIRECT_CAST, PARTS
    )
    if NORMAL:
        x = load_rows(source, start, count, within, cols, mask, SOURCE, WHOLE)
        q, scale = quantize_tile(x, place, pid_n, place == 0, count, N, side, encoding, False, WHOLE, R)
        if SUM:
            tl.store(sums_ptr + pid_m.to(tl.int64) * N + cols, tl.sum(x.to(tl.float32), 0), mask=cols < N)
    if TRANSPOSED:
        # Of groups of columns by their absolute place, whose alignment is known.
        place_t = place if MATRICES else start // TILE_M + group + place
        height = rows if MATRICES else blocks * TILE_M
        side_t = CastSide(
            qt_ptr + group.to(tl.int64) * stride_qtg,
            st_ptr + group.to(tl.int64) * stride_stg,
            amax_t_ptr + group.to(tl.int64) * stride_atg,
            groups_tm, groups_tn, stride_qtm, stride_qtn, stride_stm, stride_stn, stride_atm, stride_atn,
        )  # fmt: skip
        encoding_t: tl.constexpr = Encoding(
            ROWS_T, COLS_T, QMAX_T, EMAX_T, QMAX_MANTISSA_T, MANTISSA_BITS_T, EMIN_T, E8M0_T, POW2_T, DIRECT_CAST,
            PARTS_T,
        )  # fmt: skip
        if not CODES:
            x = load_rows(source, start, count, within, cols, mask, SOURCE, WHOLE)
            quantize_tile(x, place_t, pid_n, place == 0, height, N, side_t, encoding_t, True, EVEN, R)
        else:
            DTYPE: tl.constexpr = qt_ptr.dtype.element_ty
            if NORMAL:
                values = values_of_codes(q, scale, encoding, R)
            else:
                x = load_rows(source, start, count, within, cols, mask, SOURCE, WHOLE)
                values = values_by_scales(x, place, pid_n, side, encoding, SOURCE == "codes", DTYPE, R)
            if PARTS_T:
                bits = given_amax(values, place_t, pid_n, side_t, encoding_t, R)
            else:
                bits = amax_of_codes(values, encoding_t, R)
            store_tile(values, bits, place_t, pid_n, place == 0, height, N, side_t, encoding_t, True, EVEN, R)


@triton.jit
def quantize_rest_kernel(
    x_ptr, picked_ptr, factors_ptr, table_ptr, q_ptr, s_ptr, amax_ptr, blocks, entries, N, stride_xm, stride_xn,
    groups_n, stride_qm, stride_qn, stride_sm, stride_sn, stride_am, stride_an,
    ROWS: tl.constexpr, COLS: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, E8M0: tl.constexpr, POW2: tl.constexpr, PARTS: tl.constexpr,
    DIRECT_CAST: tl.constexpr, SOURCE: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Quantize the rows of no group: each by its own scales; zeros if a group has one scale for all rows.

    In a launch of its own: a loop takes registers of which ``quantize_groups_kernel`` has none to spare.
    """
    begin(DEPENDENT)
    source = Source(x_ptr, picked_ptr, factors_ptr, stride_xm, stride_xn)
    tiles_n = tl.cdiv(N, TILE_N)
    rest = tl.load(table_ptr + entries * FIELDS) - blocks
    for piece in range(tl.program_id(0), rest * tiles_n, tl.num_programs(0)):
        _, start, count, place = rows_of(blocks + piece // tiles_n, table_ptr, 0, False, TILE_M)
        pid_n = piece % tiles_n
        cols = pid_n * TILE_N + tl.arange(0, TILE_N)
        within = place * TILE_M + tl.arange(0, TILE_M)
        mask = (within < count)[:, None] & (cols < N)[None, :]
        if ROWS == 1:
            x = load_rows(source, start, count, within, cols, mask, SOURCE, False)
            quantize_tile(
                x, place, pid_n, place == 0, count, N,
                CastSide(q_ptr + start.to(tl.int64) * stride_qm, s_ptr + start.to(tl.int64) * stride_sm,
                         amax_ptr + start.to(tl.int64) * stride_am, count, groups_n,
                         stride_qm, stride_qn, stride_sm, stride_sn, stride_am, stride_an),
                Encoding(ROWS, COLS, QMAX, EMAX, QMAX_MANTISSA, MANTISSA_BITS, EMIN, E8M0, POW2, DIRECT_CAST, PARTS),
                False, False, 1,
            )  # fmt: skip
        else:
            offsets = (start + within).to(tl.int64)[:, None] * stride_qm + cols.to(tl.int64)[None, :] * stride_qn
            tl.store(q_ptr + offsets, tl.zeros((TILE_M, TILE_N), q_ptr.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_kernel(
    grad_ptr, gate_up_ptr, out_ptr, rows, F, stride_gm, stride_gn, stride_um, stride_un,
    BACKWARD: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``silu(gate) * up`` of ``gate_up [rows, 2 F]``, or its gradient, as the casts of groups compute them."""
    begin(DEPENDENT)
    tiles_n = tl.cdiv(F, TILE_N)
    within = (tl.program_id(0) // tiles_n * TILE_M + tl.arange(0, TILE_M))[:, None]
    cols = (tl.program_id(0) % tiles_n * TILE_N + tl.arange(0, TILE_N))[None, :]
    mask = (within < rows) & (cols < F)
    gates = gate_up_ptr + within.to(tl.int64) * stride_um
    gate = tl.load(gates + cols.to(tl.int64) * stride_un, mask=mask, other=0.0)
    up = tl.load(gates + (cols + F).to(tl.int64) * stride_un, mask=mask, other=0.0)
    if BACKWARD:
        grad = tl.load(grad_ptr + within.to(tl.int64) * stride_gm + cols.to(tl.int64) * stride_gn, mask=mask, other=0.0)
        out = out_ptr + within.to(tl.int64) * (2 * F) + cols
        tl.store(out, grad_of_gate(grad, gate, up), mask=mask)
        tl.store(out + F, swiglu(gate, grad), mask=mask)
    else:
        tl.store(out_ptr + within.to(tl.int64) * F + cols, swiglu(gate, up), mask=mask)


@triton.jit
def sum_of_rows_kernel(
    x_ptr, places_ptr, factors_ptr, out_ptr, tokens, N, stride_xm, stride_xn,
    EACH: tl.constexpr, SCALED: tl.constexpr, ROUNDED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``out [tokens, N]``: the sum of the EACH rows of ``x`` that ``places`` names for a token, times their factors.

    Rows are added in their order, in float32. ROUNDED: their products are first rounded to the dtype of ``x``.
    """
    begin(DEPENDENT)
    tiles_n = tl.cdiv(N, TILE_N)
    token = tl.program_id(0) // tiles_n * TILE_M + tl.arange(0, TILE_M)
    cols = (tl.program_id(0) % tiles_n * TILE_N + tl.arange(0, TILE_N))[None, :]
    mask = (token < tokens)[:, None] & (cols < N)
    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    for i in tl.static_range(EACH):
        at = token.to(tl.int64) * EACH + i
        row = tl.load(places_ptr + at, mask=token < tokens, other=0)
        x = tl.load(x_ptr + row.to(tl.int64)[:, None] * stride_xm + cols.to(tl.int64) * stride_xn, mask=mask, other=0.0)
        value = x.to(tl.float32)
        if SCALED:
            factor = tl.load(factors_ptr + at, mask=token < tokens, other=0.0).to(tl.float32)
            value = value * factor[:, None]
            if ROUNDED:
                value = value.to(x.dtype).to(tl.float32)
        acc += value
    tl.store(out_ptr + token.to(tl.int64)[:, None] * N + cols, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dots_of_rows_kernel(
    grad_ptr, x_ptr, places_ptr, out_ptr, N, stride_gm, stride_gn, stride_xm, stride_xn,
    EACH: tl.constexpr, ROUNDED: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``out [tokens, EACH]``: the gradient of a token times each of its rows, a program for each token.

    TILE_M is at least EACH. ROUNDED: the gradient and the products are rounded to the dtype of ``x``.
    """
    begin(DEPENDENT)
    token = tl.program_id(0)
    place = tl.arange(0, TILE_M)
    at = token.to(tl.int64) * EACH + place
    rows = x_ptr + tl.load(places_ptr + at, mask=place < EACH, other=0).to(tl.int64) * stride_xm
    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    for col in range(0, N, TILE_N):
        cols = col + tl.arange(0, TILE_N)
        from_token = grad_ptr + token.to(tl.int64) * stride_gm
        grad = tl.load(from_token + cols.to(tl.int64) * stride_gn, mask=cols < N, other=0.0)
        mask = (place < EACH)[:, None] & (cols < N)[None, :]
        x = tl.load(rows[:, None] + cols.to(tl.int64)[None, :] * stride_xn, mask=mask, other=0.0)
        if ROUNDED:
            grad = grad.to(x.dtype)
        products = grad.to(tl.float32)[None, :] * x.to(tl.float32)
        if ROUNDED:
            products = products.to(x.dtype).to(tl.float32)
        acc += products
    tl.store(out_ptr + at, tl.sum(acc, 1).to(out_ptr.dtype.element_ty), mask=place < EACH)


@triton.jit
def pick_kernel(
    q_ptr, s_ptr, picked_ptr, out_ptr, out_s_ptr, rows, N, scales,
    stride_qm, stride_sm, stride_sn, stride_om, stride_on,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_S: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The codes (uint8) and scales of the rows that ``picked`` names, one below the other; ``out`` is contiguous."""
    begin(DEPENDENT)
    at = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    source = tl.load(picked_ptr + at, mask=at < rows, other=0)
    for col in range(0, N, TILE_N):
        cols = col + tl.arange(0, TILE_N)
        mask = (at < rows)[:, None] & (cols < N)[None, :]
        codes = tl.load(q_ptr + source.to(tl.int64)[:, None] * stride_qm + cols[None, :], mask=mask, other=0)
        tl.store(out_ptr + at.to(tl.int64)[:, None] * N + cols[None, :], codes, mask=mask)
    for col in range(0, scales, TILE_S):
        cols = col + tl.arange(0, TILE_S)
        mask = (at < rows)[:, None] & (cols < scales)[None, :]
        offsets = source.to(tl.int64)[:, None] * stride_sm + cols.to(tl.int64)[None, :] * stride_sn
        to = at.to(tl.int64)[:, None] * stride_om + cols.to(tl.int64)[None, :] * stride_on
        tl.store(out_s_ptr + to, tl.load(s_ptr + offsets, mask=mask, other=0), mask=mask)


@triton.jit
def partial_sums_kernel(
    x_ptr, table_ptr, parts_ptr, N, stride_xm, stride_xn,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``parts [tiles, N]``, float32: the sum over the rows of each tile of the aligned table."""
    begin(DEPENDENT)
    tiles_n = tl.cdiv(N, TILE_N)
    tile = tl.program_id(0) // tiles_n
    cols = tl.program_id(0) % tiles_n * TILE_N + tl.arange(0, TILE_N)
    _, start, count, place = rows_of(tile, table_ptr, 0, False, TILE_M)
    within = place * TILE_M + tl.arange(0, TILE_M)
    pointers = x_ptr + start.to(tl.int64) * stride_xm
    pointers = pointers + within.to(tl.int64)[:, None] * stride_xm + cols.to(tl.int64)[None, :] * stride_xn
    x = tl.load(pointers, mask=(within < count)[:, None] & (cols < N)[None, :], other=0.0)
    tl.store(parts_ptr + tile.to(tl.int64) * N + cols, tl.sum(x.to(tl.float32), 0), mask=cols < N)


@triton.jit
def group_sums_kernel(
    parts_ptr, offsets_ptr, out_ptr, tokens, groups, N,
    TILE: tl.constexpr, TILE_P: tl.constexpr, TILE_N: tl.constexpr, SIZE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``out [groups, N]``: the sum of the parts of each group in their order, so every run gives the same bits."""
    begin(DEPENDENT)
    tiles_n = tl.cdiv(N, TILE_N)
    group = tl.program_id(0) // tiles_n
    cols = tl.program_id(0) % tiles_n * TILE_N + tl.arange(0, TILE_N)
    start, end = bounds_of(offsets_ptr, group, tokens, groups, SIZE)
    first = start // TILE + group
    acc = tl.zeros((TILE_P, TILE_N), tl.float32)
    tiles = tl.cdiv(end - start, TILE)
    for tile in range(0, tiles, TILE_P):
        part = tile + tl.arange(0, TILE_P)
        pointers = parts_ptr + (first + part).to(tl.int64)[:, None] * N + cols[None, :]
        acc += tl.load(pointers, mask=(part < tiles)[:, None] & (cols < N)[None, :], other=0.0)
    out = tl.sum(acc, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + group.to(tl.int64) * N + cols, out, mask=cols < N)
