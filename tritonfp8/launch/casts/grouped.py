"""The casts of groups: the Triton twin of each in :mod:`tritonfp8.reference.grouped`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonfp8 import reference
from tritonfp8.kernels.cast import groups as kernels
from tritonfp8.launch.casts.codes import plan_transpose_group_codes, plan_transpose_rows, transpose_group_codes
from tritonfp8.launch.casts.dense import plan_quantize
from tritonfp8.launch.casts.groups import (
    TILE,
    Groups,
    of_empty_groups,
    plan_sides,
    side_of_matrices,
    side_of_tokens,
    with_maxima,
)
from tritonfp8.launch.casts.lines import can_plan_rows, plan_columns, plan_group_rows, plan_rows, run_together
from tritonfp8.launch.casts.side import META
from tritonfp8.launch.executor import planned
from tritonfp8.launch.group_table import bounds_size
from tritonfp8.launch.launcher import launcher
from tritonfp8.launch.plan import Planner, View
from tritonfp8.specs import (
    COLUMNWISE,
    ROWWISE,
    TENSORWISE,
    QuantSpec,
    check_group_spec,
    empty_grouped_scale,
    spec_of,
    transposed,
)
from tritonfp8.specs.formats import FORMATS
from tritonfp8.tuning import cast_tiles


def _tokens(
    x: View,
    offsets: View,
    rows: View | None = None,
    factors: View | None = None,
    gate_up: View | None = None,
    swiglu: bool = False,
    amax: View | None = None,
) -> Groups | None:
    """Tokens as the kernel reads them; None if it cannot."""
    found = Groups(x, offsets.shape[0], 0, offsets, rows, factors, gate_up, swiglu, amax)
    contiguous = all(each is None or each.is_contiguous() for each in (offsets, rows, factors, amax))
    return found if x.numel() and found.tokens and contiguous else None


def _plan_picked(plan: Planner, x: View, rows: View, spec: QuantSpec) -> list[View] | None:
    """Outputs: qdata and scale of rows of ``x`` that no other row's depend on: each row of ``x`` is cast once."""
    whole = plan_quantize(plan, x, None, *spec.args, False)
    if whole is None:
        return None
    (tokens,), n = rows.shape, x.shape[1]
    qdata = plan.empty((tokens, n), FORMATS[spec.format].dtype)
    scale = plan.like(empty_grouped_scale((tokens, n), spec, "rows", 1, META))
    tile = cast_tiles.PICK
    unsigned = {1: torch.uint8, 4: torch.int32}[scale.itemsize]
    plan.launch(
        kernels.pick_kernel,
        -(-tokens // tile.m),
        (
            whole[0].retyped(torch.uint8), whole[1].retyped(unsigned), rows, qdata.retyped(torch.uint8),
            scale.retyped(unsigned),
        ),
        (tokens, n, scale.shape[1], whole[0].strides[0], *whole[1].strides, *scale.strides),
        {**tile.sizes(), "TILE_S": cast_tiles.PICK_SCALES},
        **tile.options(),
    )  # fmt: skip
    return [qdata, scale]


def plan_quantize_groups(
    plan: Planner,
    x: View,
    offsets: View,
    rows: View | None,
    factors: View | None,
    spec: str,
    transpose: bool,
    swiglu: bool,
) -> list[View] | None:
    """Outputs: qdata, scale."""
    found = spec_of(spec)
    if not transpose:
        check_group_spec(found, "rows")
    of = _tokens(x, offsets, rows, factors, swiglu=swiglu)
    if of is None:
        return None
    if not transpose and found.block[0] == 1 and factors is None and not swiglu:
        # No scale belongs to two rows, so groups do not matter.
        return plan_quantize(plan, x, None, spec, False) if rows is None else _plan_picked(plan, x, rows, found)
    side, qdata, scale = side_of_tokens(plan, of, found, transpose)
    plan_sides(plan, of, None if transpose else side, side if transpose else None)
    return [qdata, scale]


quantize_groups = launcher(plan_quantize_groups, reference.quantize_groups, of_empty_groups(reference.quantize_groups))


def plan_quantize_groups_both(
    plan: Planner,
    x: View,
    offsets: View,
    rows: View | None,
    factors: View | None,
    amax: View | None,
    spec: str,
    spec_t: str,
    swiglu: bool,
    codes: bool,
) -> list[View] | None:
    """Outputs: qdata and scale of the groups, then of their transposes."""
    found = spec_of(spec)
    check_group_spec(found, "rows")
    of = _tokens(x, offsets, rows, factors, None, swiglu, amax)
    if of is None:
        return None
    if codes:
        return _plan_codes(plan, of, offsets, spec, spec_t)
    side, qdata, scale = side_of_tokens(plan, of, found, False)
    side_t, qdata_t, scale_t = side_of_tokens(plan, of, spec_of(spec_t), True)
    plan_sides(plan, of, side, side_t)
    return [qdata, scale, qdata_t, scale_t]


def _plan_codes(plan: Planner, of: Groups, offsets: View, spec: str, spec_t: str) -> list[View] | None:
    """Outputs of :func:`plan_quantize_groups_both`, the transposes made from codes."""
    found, found_t = spec_of(spec), spec_of(spec_t)
    if -1 not in (*found.block, *found_t.block):
        side, qdata, scale = side_of_tokens(plan, of, found, False)
        side_t, qdata_t, scale_t = side_of_tokens(plan, of, found_t, True)
        plan_sides(plan, of, side, side_t, codes=True)
        return [qdata, scale, qdata_t, scale_t]
    fit = of.x.strides[1] == 1 and cast_tiles.rows_with_columns(of.width, of.x.itemsize, True) is not None
    if fit and found.block == found_t.block == ROWWISE:
        return _plan_codes_of_rows(plan, of, found, found_t)
    first = plan_quantize_groups(plan, of.x, offsets, of.picked, of.factors, spec, False, of.swiglu)
    second = None if first is None else plan_transpose_group_codes(plan, first[0], first[1], offsets, spec, spec_t)
    return None if first is None or second is None else [*first, *second]


def _plan_codes_of_rows(plan: Planner, of: Groups, spec: QuantSpec, spec_t: QuantSpec) -> list[View] | None:
    """Outputs of :func:`_plan_codes` of rows that fit in a tile: their cast finds the amaxes of columns, too."""
    table = of.table(plan)
    side, qdata, scale = side_of_tokens(plan, of, spec, False)
    amax = plan_group_rows(plan, of, table, side)
    of_codes = Groups(qdata, of.groups, 0, of.offsets, amax=amax, tiles=table)
    transposes = plan_transpose_rows(plan, of_codes, scale, spec, spec_t)
    return None if transposes is None else [qdata, scale, *transposes]


def _both_of_codes(
    x: Tensor, offsets: Tensor, spec: str, spec_t: str, rows: Any, factors: Any, swiglu: bool, amax: Any, codes: bool
) -> tuple[Tensor, ...] | None:
    if not codes or not x.numel():
        return of_empty_groups(reference.quantize_groups_both)(
            x, offsets, spec, spec_t, rows, factors, swiglu, amax, codes
        )
    pair = quantize_groups(x, offsets, spec, False, rows, factors, swiglu)
    return *pair, *transpose_group_codes(*pair, offsets, spec, spec_t)


quantize_groups_both = launcher(plan_quantize_groups_both, reference.quantize_groups_both, _both_of_codes)


def plan_swiglu_backward_amax(
    plan: Planner, grad: View, gate_up: View, offsets: View, spec: str, spec_t: str
) -> list[View] | None:
    """Outputs: the gradient of ``gate_up``, and its amaxes."""
    found = _swiglu_backward_amax(plan, grad, gate_up, offsets, spec, spec_t, None)
    return found and [*found]


def plan_swiglu_backward_amax_(
    plan: Planner, grad: View, gate_up: View, offsets: View, spec: str, spec_t: str
) -> list[View] | None:
    """One output, the amaxes: ``gate_up`` is written over."""
    if not gate_up.is_contiguous():
        return None
    found = _swiglu_backward_amax(plan, grad, gate_up, offsets, spec, spec_t, gate_up)
    return found and [found[1]]


def _swiglu_backward_amax(
    plan: Planner, grad: View, gate_up: View, offsets: View, spec: str, spec_t: str, out: View | None
) -> tuple[View, View] | None:
    of = _tokens(grad, offsets, gate_up=gate_up, swiglu=True)
    blocks = (spec_of(spec).block, transposed(spec_of(spec_t).block))
    if of is None or not any(-1 in block for block in blocks):
        return None
    of = with_maxima(plan, of, of.table(plan), blocks, out)
    assert of.amax is not None
    return of.x, of.amax


swiglu_backward_amax = launcher(
    plan_swiglu_backward_amax, reference.swiglu_backward_amax, of_empty_groups(reference.swiglu_backward_amax)
)


def swiglu_backward_amax_(
    grad: Tensor, gate_up: Tensor, offsets: Tensor, spec: str, spec_t: str
) -> tuple[Tensor, Tensor]:
    """:func:`swiglu_backward_amax`, written over ``gate_up``, which is returned with the amaxes."""
    results = planned(plan_swiglu_backward_amax_, (grad, gate_up, offsets), (spec, spec_t))
    if results is not None:
        return gate_up, results[0]
    found, amax = swiglu_backward_amax(grad, gate_up, offsets, spec, spec_t)
    return gate_up.copy_(found), amax


def _matrices(x: View) -> tuple[Groups, bool] | None:
    """Matrices as the kernel reads them, and whether it reads their transposes; None if they must be copied first."""
    if not x.numel():
        return None
    groups, n, k = x.shape
    if x.is_contiguous():
        return Groups(x.strided((groups * n, k), (k, 1)), groups, n, None), False
    if x.transposed(1, 2).is_contiguous():
        return Groups(x.strided((groups * k, n), (n, 1)), groups, k, None), True
    return None


def plan_quantize_matrices(plan: Planner, x: View, amax: View | None, spec: str, transpose: bool) -> list[View] | None:
    """Outputs: qdata, scale."""
    matrices = _matrices(x)
    if matrices is None:
        return None
    of, swaps = matrices
    found = spec_of(spec)
    side, qdata, scale = side_of_matrices(plan, x.shape, found, transpose)
    if swaps:
        side = side.swapped()
    stays = transpose == swaps
    if amax is not None:
        if -1 not in side.block or not amax.is_contiguous():
            return None
        of = of._replace(amax=amax.strided((amax.numel(),), (1,)).retyped(torch.int32))
        plan_sides(plan, of, side if stays else None, None if stays else side)
        return [qdata, scale]
    if (
        not transpose
        and not swaps
        and (found.block[0] == 1 or (found.block[0] != -1 and of.rows % found.block[0] == 0))
    ):
        # No scale belongs to two matrices, so they are one.
        whole = plan_quantize(plan, of.x, None, spec, False)
        assert whole is not None
        return [whole[0].strided(qdata.shape, qdata.strides), whole[1].strided(scale.shape, scale.strides)]
    if side.block == COLUMNWISE and run_together(of.rows, plan.device.num_sms):
        plan_columns(plan, of.x, of.groups, side, not stays)
    else:
        plan_sides(plan, of, side if stays else None, None if stays else side)
    return [qdata, scale]


quantize_matrices = launcher(plan_quantize_matrices, reference.quantize_matrices)


def plan_quantize_matrices_with_amax(plan: Planner, x: View, spec: str, spec_t: str, codes: bool) -> list[View] | None:
    """Outputs: qdata, scale, and the amaxes, float32."""
    if not x.numel() or not x.is_contiguous():
        return None
    groups, n, k = x.shape
    found = spec_of(spec)
    block, block_t = found.block, transposed(spec_of(spec_t).block)
    of = Groups(x.strided((groups * n, k), (k, 1)), groups, n, None)
    side, qdata, scale = side_of_matrices(plan, x.shape, found, False)
    if (block, block_t) == (ROWWISE, COLUMNWISE) and can_plan_rows(of.x, codes):
        rows = qdata.strided(of.x.shape, (k, 1)), scale.strided((groups * n, 1), (1, 1))
        amax, _ = plan_rows(plan, of.x, groups, found, *rows, codes)
        return [qdata, scale, amax.strided((groups, k, 1), (k, 1, 1))]
    if codes or (block, block_t) != (TENSORWISE, TENSORWISE):
        return None
    of = with_maxima(plan, of, of.table(plan), [TENSORWISE])
    assert of.amax is not None
    plan_sides(plan, of, side, None)
    return [qdata, scale, of.amax.strided((groups, 1, 1), (1, 1, 1)).retyped(torch.float32)]


# An amax of NaN may have any payload.
quantize_matrices_with_amax = launcher(plan_quantize_matrices_with_amax, reference.quantize_matrices_with_amax)


def plan_grouped_sum(plan: Planner, x: View, offsets: View) -> list[View] | None:
    """One output, ``[groups, N]``."""
    of = _tokens(x, offsets)
    if of is None:
        return None
    tokens, n = x.shape
    out = plan.empty((of.groups, n), x.dtype)
    table, _ = of.table(plan)
    parts = plan.empty((of.blocks, n), torch.float32)
    tile = TILE
    plan.launch(
        kernels.partial_sums_kernel,
        of.blocks * -(-n // tile.n),
        (x, table, parts),
        (n, *x.strides),
        tile.sizes(),
        **tile.options(),
    )
    final = cast_tiles.GROUP_SUMS
    plan.launch(
        kernels.group_sums_kernel,
        of.groups * -(-n // final.n),
        (parts, offsets, out),
        (tokens, of.groups, n),
        {"TILE": tile.m, "TILE_P": final.m, "TILE_N": final.n, "SIZE": bounds_size(of.groups)},
        **final.options(),
    )
    return [out]


grouped_sum = launcher(plan_grouped_sum, reference.grouped_sum, of_empty_groups(reference.grouped_sum))
