"""Transposes of quantized tensors, made from codes: of one matrix, of matrices, and of groups of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonfp8 import reference
from tritonfp8.launch.casts.dense import new_side, transpose
from tritonfp8.launch.casts.groups import Groups, of_empty_groups, plan_sides, side_of_matrices, side_of_tokens
from tritonfp8.launch.casts.side import Side
from tritonfp8.launch.casts.transposes import plan_transposes
from tritonfp8.launch.launcher import launcher
from tritonfp8.launch.plan import Planner, View
from tritonfp8.specs import ROWWISE, QuantSpec, check_group_spec, check_transposable, moves_codes, spec_of
from tritonfp8.specs.formats import FORMATS


def _source(x: View, scale: View, spec: QuantSpec, grouped: bool) -> Side:
    """The side of codes that a kernel reads: scales, in the coordinates of ``x``, of each matrix or of groups."""
    if x.ndim == 3:
        (group, row, col), sizes = scale.strides, scale.shape[1:]
    elif grouped and spec.block[0] == -1:
        (group, col), row, sizes = scale.strides, 0, (1, scale.shape[1])
    else:
        (row, col), group, sizes = scale.strides, 0, scale.shape
    return Side(x, (0, 0, 0), scale, (row, col, group), sizes, spec.block, spec)


def _is_codes(x: View, spec: QuantSpec) -> bool:
    return x.dtype == FORMATS[spec.format].dtype


def plan_transpose_codes(
    plan: Planner, x: View, scale: View, amax: View | None, spec: str, spec_t: str
) -> list[View] | None:
    """Outputs: qdata, scale."""
    found, found_t = spec_of(spec), spec_of(spec_t)
    check_transposable(found, found_t)
    if not x.numel() or moves_codes(found, found_t) or x.strides[-1] != 1:
        return None
    if x.ndim == 2 and amax is None and not _is_codes(x, found) and (found.block, found_t.block) == (ROWWISE, ROWWISE):
        return plan_transposes(plan, [x], found_t, [scale], found)
    if x.ndim == 3:
        groups, n, k = x.shape
        if not x.is_contiguous():
            return None
        of = Groups(x.strided((groups * n, k), (k, 1)), groups, n, None)
        side, *outputs = side_of_matrices(plan, x.shape, found_t, True)
    else:
        of = Groups(x, 1, x.shape[0], None)
        side, *outputs = new_side(plan, x.shape, found_t, True)
    if amax is not None:
        if -1 not in side.block or not amax.is_contiguous():
            return None
        of = of._replace(amax=amax.strided((amax.numel(),), (1,)).retyped(torch.int32))
    return _transposed(plan, of, _source(x, scale, found, False), side, outputs)


def plan_transpose_group_codes(
    plan: Planner, x: View, scale: View, offsets: View, spec: str, spec_t: str
) -> list[View] | None:
    """Outputs: qdata, scale."""
    found = spec_of(spec)
    check_group_spec(found, "rows")
    if not offsets.is_contiguous():
        return None
    return plan_transpose_rows(plan, Groups(x, offsets.shape[0], 0, offsets), scale, found, spec_of(spec_t))


def plan_transpose_rows(
    plan: Planner, of: Groups, scale: View, spec: QuantSpec, spec_t: QuantSpec
) -> list[View] | None:
    """Outputs of :func:`plan_transpose_group_codes`, for groups whose amaxes may be known."""
    check_transposable(spec, spec_t)
    if not of.x.numel() or moves_codes(spec, spec_t) or of.x.strides[-1] != 1:
        return None
    side, *outputs = side_of_tokens(plan, of, spec_t, True)
    return _transposed(plan, of, _source(of.x, scale, spec, True), side, outputs)


def _transposed(plan: Planner, of: Groups, source: Side, side: Side, outputs: list[View]) -> list[View] | None:
    """``outputs``, filled from codes or from the values that they were made of; None if no kernel finds the amaxes."""
    is_codes = _is_codes(of.x, source.spec)
    has_rows = source.block == ROWWISE and source.scale.is_contiguous()
    if of.amax is None and -1 in side.block and not (is_codes and has_rows):
        return None
    of = of._replace(factors=source.scale if has_rows else None, codes="codes" if is_codes else "cast")
    plan_sides(plan, of, None, side, read=source)
    return outputs


def _moved(x: Tensor, scale: Tensor, spec: str, spec_t: str, amax: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Square blocks of one matrix, which keep their codes."""
    found = spec_of(spec)
    if not moves_codes(found, spec_of(spec_t)) or x.ndim != 2 or not x.numel():
        return None
    qdata = reference.casts.codes_by(x, scale, found)
    return transpose(qdata), scale.t().clone(memory_format=torch.contiguous_format)


def _of_no_rows(x: Tensor, scale: Tensor, offsets: Tensor, spec: str, spec_t: str) -> tuple[Tensor, Tensor] | None:
    """Groups without elements. Others without a plan, such as square blocks, are left to the reference."""
    serve = of_empty_groups(reference.transpose_group_codes)
    return None if x.numel() else serve(x, scale, offsets, spec, spec_t)


transpose_codes = launcher(plan_transpose_codes, reference.transpose_codes, _moved)
transpose_group_codes = launcher(plan_transpose_group_codes, reference.transpose_group_codes, _of_no_rows)
