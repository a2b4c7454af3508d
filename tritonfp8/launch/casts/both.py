"""Casts of one tensor in both orientations, or in one with the amaxes of the other."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonfp8 import reference
from tritonfp8.kernels.cast import quantize as quantize_kernels
from tritonfp8.launch.casts import groups
from tritonfp8.launch.casts.codes import plan_transpose_codes, transpose_codes
from tritonfp8.launch.casts.dense import (
    new_side,
    plan_quantize,
    plan_sides,
    quantize,
    reads_along_columns,
    whole_dim_amax,
)
from tritonfp8.launch.casts.lines import can_plan_rows, plan_rows
from tritonfp8.launch.launcher import launcher
from tritonfp8.launch.plan import Planner, View
from tritonfp8.specs import COLUMNWISE, ROWWISE, TENSORWISE, QuantSpec, moves_codes, spec_of, transposed
from tritonfp8.tuning import cast_tiles


def plan_both_sides(plan: Planner, x: View, spec: str, spec_t: str, with_sums: bool) -> tuple[list[View], View | None]:
    """qdata and scale of the matrix and of its transpose; with sums, what :func:`plan_sides` says."""
    side, qdata, scale = new_side(plan, x.shape, spec_of(spec), False)
    side_t, qdata_t, scale_t = new_side(plan, x.shape, spec_of(spec_t), True)
    return [qdata, scale, qdata_t, scale_t], plan_sides(plan, x, side, side_t, with_sums)


def plan_quantize_both(plan: Planner, x: View, spec: str, spec_t: str, codes: bool) -> list[View] | None:
    """Outputs: qdata and scale of the matrix, then of its transpose."""
    if not x.numel():
        return None
    found = _plan_codes(plan, x, spec, spec_t, False) if codes else plan_both_sides(plan, x, spec, spec_t, False)
    return None if found is None else found[0]


def _plan_codes(
    plan: Planner, x: View, spec: str, spec_t: str, with_sums: bool
) -> tuple[list[View], View | None] | None:
    """Outputs of :func:`plan_both_sides`, the transpose made from codes."""
    found, found_t = spec_of(spec), spec_of(spec_t)
    if moves_codes(found, found_t) or x.strides[1] != 1:
        return None
    if -1 not in (*found.block, *found_t.block):
        # A tile of one pass holds all blocks whole.
        side, *first = new_side(plan, x.shape, found, False)
        side_t, *second = new_side(plan, x.shape, found_t, True)
        matrix = groups.Groups(x, 1, x.shape[0], None)
        sums = groups.plan_sides(plan, matrix, side, side_t, codes=True, with_sums=with_sums)
        return [*first, *second], sums
    # Longer rows, which codes leave room for, have no registers for sums.
    if with_sums and not (found.block == found_t.block == ROWWISE and can_plan_rows(x)):
        return None
    outputs, sums = _plan_with_amax(plan, x, spec, spec_t, True, with_sums) or (None, None)
    amax = None if outputs is None else outputs.pop()
    outputs = outputs or plan_quantize(plan, x, None, spec, False)
    assert outputs is not None
    transposes = plan_transpose_codes(plan, outputs[0], outputs[1], amax, spec, spec_t)
    return None if transposes is None else ([*outputs, *transposes], sums)


def _both_of_codes(x: Tensor, spec: str, spec_t: str, codes: bool) -> tuple[Tensor, ...] | None:
    if not codes or not x.numel():
        return None
    pair = quantize(x, spec)
    return *pair, *transpose_codes(*pair, spec, spec_t)


quantize_both = launcher(plan_quantize_both, reference.quantize_both, _both_of_codes)


def plan_quantize_both_sum(plan: Planner, x: View, spec: str, spec_t: str, codes: bool) -> list[View] | None:
    """Outputs: qdata and scale of the matrix, then of its transpose, and sums ``[n]``. None along columns."""
    # float64 is summed as float64, and cast by way of float32.
    if not x.numel() or reads_along_columns(x) or x.dtype == torch.float64:
        return None
    found = _plan_codes(plan, x, spec, spec_t, True) if codes else plan_both_sides(plan, x, spec, spec_t, True)
    if found is None:
        return None
    outputs, parts = found
    assert parts is not None
    n = x.shape[1]
    sums = plan.empty((n,), x.dtype)
    tile = cast_tiles.COLUMN_SUMS
    plan.launch(
        quantize_kernels.column_sums_kernel,
        -(-n // tile.n),
        (parts, sums),
        parts.shape,
        {"TILE_P": tile.m, "TILE_N": tile.n},
        **tile.options(),
    )
    return [*outputs, sums]


def _sum_alone(x: Tensor, spec: str, spec_t: str, codes: bool) -> tuple[Tensor, ...]:
    return *quantize_both(x, spec, spec_t, codes), x.sum(0)


quantize_both_sum = launcher(plan_quantize_both_sum, reference.quantize_both_sum, _sum_alone)


def plan_quantize_with_amax(plan: Planner, x: View, spec: str, spec_t: str, codes: bool) -> list[View] | None:
    """Outputs: qdata, scale, and the amaxes, float32."""
    found = _plan_with_amax(plan, x, spec, spec_t, codes, False)
    return None if found is None else found[0]


def _plan_with_amax(
    plan: Planner, x: View, spec: str, spec_t: str, codes: bool, with_sums: bool
) -> tuple[list[View], View | None] | None:
    """Outputs of :func:`plan_quantize_with_amax`; with sums, of a matrix that :func:`plan_rows` casts, the sums too."""
    found = spec_of(spec)
    blocks = (found.block, transposed(spec_of(spec_t).block))
    if not x.numel() or blocks not in ((TENSORWISE, TENSORWISE), (ROWWISE, COLUMNWISE)):
        return None
    if codes and (found.block == TENSORWISE or not can_plan_rows(x, True)):
        return (_plan_amax_of_codes(plan, x, found), None) if found.block == ROWWISE and x.strides[1] == 1 else None
    side, qdata, scale = new_side(plan, x.shape, found, False)
    sums = None
    along = x.t() if reads_along_columns(x) else x
    if found.block == TENSORWISE:
        amax = plan.empty((1, 1), torch.float32)
        # As for both orientations, the maxima of all programs are reduced before the cast.
        bits = whole_dim_amax(plan, along, [TENSORWISE], True, True, amax)[TENSORWISE]
        plan_sides(plan, x, side.with_parts(bits), None)
    elif can_plan_rows(x, codes):
        amax, sums = plan_rows(plan, x, 1, found, qdata, scale, codes, with_sums)
    else:
        m, n = x.shape
        maxima = plan.empty((1, m + n), torch.float32)
        of_lines = whole_dim_amax(plan, along, [ROWWISE, COLUMNWISE], True, True, maxima)
        # The maxima of the rows of ``along`` come first.
        of_rows, start = (of_lines[ROWWISE], m) if along is x else (of_lines[COLUMNWISE].transposed(1, 2), 0)
        plan_sides(plan, x, side.with_parts(of_rows), None)
        amax = maxima.strided((1, n), (n, 1), start)
    return [qdata, scale, amax.strided((amax.shape[1], 1), (1, 1))], sums


def _plan_amax_of_codes(plan: Planner, x: View, spec: QuantSpec) -> list[View]:
    """Outputs of :func:`plan_quantize_with_amax` for long rows: the amaxes of columns are found in a second pass."""
    pair = plan_quantize(plan, x, None, *spec.args, False)
    assert pair is not None
    m, n = x.shape
    of = groups.Groups(pair[0], 1, m, None, factors=pair[1], codes="codes")
    amax = groups.with_maxima(plan, of, of.table(plan), [COLUMNWISE]).amax
    assert amax is not None
    return [*pair, amax.strided((n, 1), (1, 1)).retyped(torch.float32)]


# An amax of NaN may have any payload.
quantize_with_amax = launcher(plan_quantize_with_amax, reference.quantize_with_amax)
