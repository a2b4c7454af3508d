"""The fused producers: the Triton twin of each op in :mod:`tritonfp8.reference.fused`.

A planner (``plan_...``) makes the plan of a call. The function of the op's name runs it, and serves in plain Python the
calls that no plan serves: empty tensors, rows longer than a kernel holds, weights that must be copied.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from tritonfp8 import reference
from tritonfp8.kernels.fused import rms_norm as rms_norm_kernels
from tritonfp8.kernels.fused import swiglu as kernels
from tritonfp8.launch import cast
from tritonfp8.launch.executor import planned
from tritonfp8.launch.partial_maxima import PartialMaxima
from tritonfp8.launch.plan import Planner, View, kernel_constants
from tritonfp8.launch.tile_casts import Inputs, Side, plan_amax, plan_tiles, results_of, sides_of
from tritonfp8.specs import COLUMNWISE, ORIENTATIONS, ROWWISE, TENSORWISE, QuantSpec, spec_of
from tritonfp8.tuning import BlockShape, fused_tiles

__all__ = ["rms_norm_backward", "rms_norm_quantize", "silu_mul_backward_quantize", "silu_mul_quantize"]

# Constants of a result that is not wanted.
UNUSED = QuantSpec("e4m3", ROWWISE, "fp32", "pow2")


def _plan_rms_norm_rows(
    plan: Planner, x: View, weight: View, rstd: View, eps: float, round_normalized: bool, side: Side | None,
    kept: View | None, blocks: Collection[BlockShape],
) -> dict[BlockShape, View]:  # fmt: skip
    """rstd; the rows quantized by ``side``; ``y`` kept. Returns the amax of ``blocks`` that span whole columns."""
    m, n = x.shape
    config, width = fused_tiles.rows_config(fused_tiles.RMS_NORM, n)
    sizes = {COLUMNWISE: n, TENSORWISE: 1}
    if COLUMNWISE in blocks:
        config = config._replace(per_sm=min(config.per_sm, config.writing_parts))
    programs = config.programs(m, plan.device.num_sms)
    maxima = {
        block: PartialMaxima.allocate(plan, x, 0, size, 0, programs) for block, size in sizes.items() if block in blocks
    }
    columns, tensor = (maxima[block].buffer if block in maxima else rstd for block in sizes)
    constants, pointers, strides = kernel_constants(UNUSED, ROWWISE), [x, x], [0, 0]
    if side is not None:
        constants = side.constants()
        pointers, strides = side.pointers()[:2], side.scale_strides()[1:]
    plan.launch(
        rms_norm_kernels.rms_norm_rows_kernel,
        programs,
        (x, weight, rstd, x if kept is None else kept, *pointers, columns, tensor),
        (m, n, *x.strides, weight.strides[0], *strides),
        {
            **{name: value for name, value in constants.items() if name != "ROWS"},
            "EPS": eps,
            "ROUND_NORMALIZED": round_normalized,
            "NORMAL": side is not None,
            "KEEP": kept is not None,
            "COLUMN_AMAX": COLUMNWISE in maxima,
            "TENSOR_AMAX": TENSORWISE in maxima,
            "DIRECT_CAST": plan.device.has_direct_cast,
            "PREFETCH": config.prefetch,
            "HOLD_WEIGHT": config.hold,
            "TILE_M": config.rows,
            "TILE_N": width,
        },
        num_warps=config.warps,
    )
    return {block: of_block.reduce(plan)[1] for block, of_block in maxima.items()}


def plan_rms_norm_quantize(
    plan: Planner, x: View, weight: View, eps: float, rounding: str, spec: str, spec_t: str, orientation: str,
    keep: bool,
) -> list[View] | None:  # fmt: skip
    """Outputs: the results, rstd, and y if it is kept."""
    m, n = x.shape
    if not x.numel() or n > fused_tiles.MAX_ROW or not weight.within_32_bits():
        return None
    specs = spec_of(spec), spec_of(spec_t)
    results = results_of(plan, 0, (m, n), *specs, orientation)
    side, side_t = sides_of(results, *specs, orientation)
    rstd = plan.empty((m,), torch.float32)
    y = plan.empty((m, n), x.dtype) if keep else None
    by_rows = side if side is not None and side.block[0] == 1 else None
    by_tiles = side if by_rows is None else None
    blocks = {s.block for s in (by_tiles, side_t) if s is not None}
    found = _plan_rms_norm_rows(plan, x, weight, rstd, eps, rounding == "normalized", by_rows, y, blocks)
    if by_tiles is not None or side_t is not None:
        inputs = Inputs(
            "rms_norm", (x, rstd, weight), (*x.strides, 1, 1, 1, weight.strides[0]), (m, n), rounding == "normalized"
        )
        by_tiles, side_t = (None if s is None else s._replace(amax=found.get(s.block)) for s in (by_tiles, side_t))
        plan_tiles(plan, inputs, by_tiles, side_t, None)
    return [*results, rstd, *([] if y is None else [y])]


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, rounding: str, spec: str, spec_t: str, orientation: str, keep: bool
) -> list[Tensor]:
    """Launch the twin of :func:`tritonfp8.reference.rms_norm_quantize`."""
    options = (eps, rounding, spec, spec_t, orientation, keep)
    results = planned(plan_rms_norm_quantize, (x, weight), options)
    if results is not None:
        return list(results)
    if not x.numel():
        return reference.rms_norm_quantize(x, weight, *options)
    if x.shape[1] > fused_tiles.MAX_ROW:
        return _rms_norm_then_quantize(x, weight, *options)
    return rms_norm_quantize(x, weight.contiguous(), *options)


def _rms_norm_then_quantize(
    x: Tensor, weight: Tensor, eps: float, rounding: str, spec: str, spec_t: str, orientation: str, keep: bool
) -> list[Tensor]:
    y, rstd = reference.rms_norm(x, weight, eps, rounding)
    normal, transpose = ORIENTATIONS[orientation]
    if normal and transpose:
        results = list(cast.quantize_both(y, spec, spec_t))
    else:
        results = list(cast.quantize(y, spec if normal else spec_t, not normal))
    return [*results, rstd, *([y] if keep else [])]


def plan_rms_norm_backward(
    plan: Planner, grad: View, x: View, weight: View, rstd: View, residual: View | None, rounding: str,
    needs_weight: bool,
) -> list[View] | None:  # fmt: skip
    """Outputs: the gradient of x, and that of the weight if it is needed."""
    m, n = x.shape
    if not x.numel() or n > fused_tiles.MAX_ROW or not weight.within_32_bits():
        return None
    config, width = fused_tiles.rows_config(fused_tiles.RMS_NORM_BACKWARD, n)
    programs = config.programs(m, plan.device.num_sms)
    out = plan.empty((m, n), x.dtype)
    partial = plan.empty((programs, n) if needs_weight else (1, 1), torch.float32)
    added = x if residual is None else residual
    plan.launch(
        rms_norm_kernels.rms_norm_backward_kernel,
        programs,
        (grad, x, weight, rstd, added, out, partial),
        (m, n, *grad.strides, *x.strides, weight.strides[0], *added.strides),
        {
            "ROUND_NORMALIZED": rounding == "normalized",
            "HAS_RESIDUAL": residual is not None,
            "GRAD_WEIGHT": needs_weight,
            "PREFETCH": config.prefetch,
            "TILE_M": config.rows,
            "TILE_N": width,
        },
        num_warps=config.warps,
    )
    if not needs_weight:
        return [out]
    grad_weight = plan.empty((n,), weight.dtype)
    tiles = fused_tiles.SUM_TILES
    plan.launch(
        rms_norm_kernels.sum_partials_kernel,
        -(-n // tiles.n),
        (partial, grad_weight),
        (programs, n),
        {"TILE_P": tiles.m, "TILE_N": tiles.n},
        num_warps=tiles.warps,
    )
    return [out, grad_weight]


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, rounding: str, residual: Tensor | None, needs_weight: bool
) -> list[Tensor]:
    """Launch the twin of :func:`tritonfp8.reference.rms_norm_backward`."""
    results = planned(plan_rms_norm_backward, (grad, x, weight, rstd, residual), (rounding, needs_weight))
    if results is not None:
        return list(results)
    if not x.numel() or x.shape[1] > fused_tiles.MAX_ROW:
        return reference.rms_norm_backward(grad, x, weight, rstd, rounding, residual, needs_weight)
    return rms_norm_backward(grad, x, weight.contiguous(), rstd, rounding, residual, needs_weight)


def _plan_silu_mul_rows(plan: Planner, gate: View, up: View, side: Side, kept: View | None) -> None:
    m, n = gate.shape
    config, width = fused_tiles.rows_config(fused_tiles.SILU_MUL_ROWS, n)
    plan.launch(
        kernels.silu_mul_rows_kernel,
        -(-m // config.rows),
        (gate, up, gate if kept is None else kept, *side.pointers()[:2]),
        (m, n, *gate.strides, *up.strides, *side.scale_strides()[1:]),
        {
            **{name: value for name, value in side.constants().items() if name not in ("ROWS", "COLS")},
            "KEEP": kept is not None,
            "DIRECT_CAST": plan.device.has_direct_cast,
            "TILE_M": config.rows,
            "TILE_N": width,
        },
        num_warps=config.warps,
    )


def plan_silu_mul_quantize(
    plan: Planner, gate: View, up: View, spec: str, spec_t: str, orientation: str, keep: bool
) -> list[View] | None:
    """Outputs: the results, and the unquantized result if it is kept."""
    if not gate.numel():
        return None
    m, n = gate.shape
    specs = spec_of(spec), spec_of(spec_t)
    results = results_of(plan, 0, (m, n), *specs, orientation)
    side, side_t = sides_of(results, *specs, orientation)
    kept = plan.empty((m, n), gate.dtype) if keep else None
    if side is not None and side_t is None and side.block == ROWWISE and n <= fused_tiles.MAX_ROW:
        _plan_silu_mul_rows(plan, gate, up, side, kept)
    else:
        # The kernel does not read the third input.
        inputs = Inputs("silu_mul", (gate, up, gate), (*gate.strides, *up.strides, 0, 0), (m, n))
        plan_tiles(plan, inputs, *plan_amax(plan, inputs, side, side_t), kept)
    return [*results, *([] if kept is None else [kept])]


def silu_mul_quantize(gate: Tensor, up: Tensor, spec: str, spec_t: str, orientation: str, keep: bool) -> list[Tensor]:
    """Launch the twin of :func:`tritonfp8.reference.silu_mul_quantize`."""
    results = planned(plan_silu_mul_quantize, (gate, up), (spec, spec_t, orientation, keep))
    if results is None:
        return reference.silu_mul_quantize(gate, up, spec, spec_t, orientation, keep)
    return list(results)


def plan_silu_mul_backward_quantize(
    plan: Planner, grad: View, gate: View, up: View, spec: str, spec_t: str, orientation: str, keep: bool
) -> list[View] | None:
    """Outputs: the results ``[2, ...]`` of both gradients, and the unquantized gradients if they are kept."""
    if not gate.numel():
        return None
    m, n = gate.shape
    specs = spec_of(spec), spec_of(spec_t)
    results = results_of(plan, 2, (m, n), *specs, orientation)
    kept = plan.empty((2, m, n), gate.dtype) if keep else None
    inputs = Inputs("silu_mul_backward", (gate, up, grad), (*gate.strides, *up.strides, *grad.strides), (m, n))
    plan_tiles(plan, inputs, *plan_amax(plan, inputs, *sides_of(results, *specs, orientation)), kept)
    return [*results, *([] if kept is None else [kept])]


def silu_mul_backward_quantize(
    grad: Tensor, gate: Tensor, up: Tensor, spec: str, spec_t: str, orientation: str, keep: bool
) -> list[Tensor]:
    """Launch the twin of :func:`tritonfp8.reference.silu_mul_backward_quantize`."""
    results = planned(plan_silu_mul_backward_quantize, (grad, gate, up), (spec, spec_t, orientation, keep))
    if results is None:
        return reference.silu_mul_backward_quantize(grad, gate, up, spec, spec_t, orientation, keep)
    return list(results)
