"""Launch norms, logsumexp and gates whose rows have bits of their own. Twins of the reference's."""

from __future__ import annotations

import torch
import triton

from tritonfp8 import reference
from tritonfp8.kernels.exact import rows as kernels
from tritonfp8.launch.launcher import launcher
from tritonfp8.launch.plan import Planner, View

# A product and a sum are one FMA where a kernel says so, and nowhere else: a compiler could choose by the shape.
OPTIONS = {"enable_fp_fusion": False}
_LONGEST_NORM, _LONGEST_BLOCK, _ELEMENTS = 32768, 4096, 1024
_SUMMED_ROWS, _SUMMED_COLUMNS = 32, 64
_ON_KERNELS = (torch.bfloat16, torch.float16, torch.float32)


def _rows(x: View) -> View | None:
    """``x [..., N]`` as rows that a kernel reads; None if their elements do not follow each other."""
    folded = x.folded() if x.ndim else None
    return folded if folded is not None and folded.strides[1] == 1 and x.dtype in _ON_KERNELS else None


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 32)


def plan_rms_norm(plan: Planner, x: View, weight: View, eps: float, unit_offset: bool) -> list[View] | None:
    """Two outputs: like ``x``, and ``[rows]``."""
    reference.check_norm(x.shape, weight.shape)
    rows = _rows(x)
    if not x.numel() or rows is None or not weight.is_contiguous() or x.shape[-1] > _LONGEST_NORM:
        return None
    count, n = rows.shape
    out = plan.empty(x.shape, x.dtype if unit_offset else torch.promote_types(x.dtype, weight.dtype))
    rstd = plan.empty((count,), torch.float32)
    block = triton.next_power_of_2(n)
    plan.launch(
        kernels.rms_norm_kernel,
        count,
        (rows, weight, out, rstd),
        (n, rows.strides[0]),
        {"EPS": eps, "UNIT_OFFSET": unit_offset, "BLOCK": block},
        num_warps=_warps(block),
        **OPTIONS,
    )
    return [out, rstd]


def plan_rms_norm_backward(
    plan: Planner, grad: View, x: View, weight: View, rstd: View, unit_offset: bool
) -> list[View] | None:
    """Two outputs: like ``x``, and like ``weight``."""
    rows, grads = _rows(x), _rows(grad)
    if not x.numel() or rows is None or grads is None or x.shape[-1] > _LONGEST_NORM:
        return None
    if not (weight.is_contiguous() and rstd.is_contiguous()):
        return None
    count, n = rows.shape
    block = triton.next_power_of_2(n)
    out, of_weight = plan.empty(x.shape, x.dtype), plan.empty(weight.shape, weight.dtype)
    programs = min(count, 4 * plan.device.num_sms)
    parts = plan.empty((programs, n), torch.float32)
    plan.launch(
        kernels.rms_norm_backward_kernel,
        programs,
        (grads, rows, weight, rstd, out, parts),
        (count, n, grads.strides[0], rows.strides[0]),
        {"UNIT_OFFSET": unit_offset, "BLOCK": block},
        num_warps=_warps(block),
    )
    plan.launch(
        kernels.sum_parts_kernel,
        -(-n // _SUMMED_COLUMNS),
        (parts, of_weight),
        (programs, n),
        {"TILE": _SUMMED_ROWS, "BLOCK": _SUMMED_COLUMNS},
        num_warps=4,
    )
    return [out, of_weight]


def plan_row_logsumexp(plan: Planner, x: View, temperature: float) -> list[View] | None:
    """One output, the shape of ``x`` without its last dim."""
    reference.check_temperature(temperature)
    rows = _rows(x)
    if not x.numel() or rows is None:
        return None
    count, n = rows.shape
    out = plan.empty(x.shape[:-1], torch.float32)
    block = min(triton.next_power_of_2(n), _LONGEST_BLOCK)
    plan.launch(
        kernels.row_logsumexp_kernel,
        count,
        (rows, out),
        (n, rows.strides[0]),
        {"TEMPERATURE": temperature, "BLOCK": block},
        num_warps=_warps(block),
        **OPTIONS,
    )
    return [out]


def plan_gated(plan: Planner, gate: View, up: View, activation: str) -> list[View] | None:
    """One output, of the shape of ``gate``."""
    reference.check_gated(gate, up, activation)
    sides = [_rows(x) for x in (gate, up)]
    if not gate.numel() or None in sides:
        return None
    out = plan.empty(gate.shape, gate.dtype)
    _plan_gates(plan, kernels.gated_kernel, sides, [out], activation)
    return [out]


def plan_gated_backward(plan: Planner, grad: View, gate: View, up: View, activation: str) -> list[View] | None:
    """Two outputs, of the shape of ``gate``."""
    reference.check_gated(gate, up, activation)
    sides = [_rows(x) for x in (grad, gate, up)]
    if not gate.numel() or None in sides:
        return None
    outs = [plan.empty(x.shape, x.dtype) for x in (gate, up)]
    _plan_gates(plan, kernels.gated_backward_kernel, sides, outs, activation)
    return outs


def _plan_gates(plan: Planner, kernel: object, sides: list[View | None], outs: list[View], activation: str) -> None:
    rows = [x for x in sides if x is not None]
    count, n = rows[0].shape
    block = min(triton.next_power_of_2(n), _ELEMENTS)
    plan.launch(
        kernel,
        count * -(-n // block),
        (*rows, *outs),
        (n, *(x.strides[0] for x in rows)),
        {"ACTIVATION": activation, "BLOCK": block},
        num_warps=4,
        **OPTIONS,
    )


rms_norm = launcher(plan_rms_norm, reference.rms_norm)
rms_norm_backward = launcher(plan_rms_norm_backward, reference.rms_norm_backward)
row_logsumexp = launcher(plan_row_logsumexp, reference.row_logsumexp)
gated = launcher(plan_gated, reference.gated)
gated_backward = launcher(plan_gated_backward, reference.gated_backward)
