"""The figures of operands: the Triton twin of :mod:`tritonfp8.reference.figures`."""

from __future__ import annotations

import math

import torch

from tritonfp8 import reference
from tritonfp8.kernels.health import figures as kernels
from tritonfp8.launch.launcher import launcher
from tritonfp8.launch.plan import Planner, View

STRIP_ROWS, STRIP_COLUMNS, STRIP_WARPS = 16, 128, 8
BLOCK, WARPS = 1024, 8
READ = (torch.bfloat16, torch.float16, torch.float32)


def plan_operand_figures(
    plan: Planner, x: View, whole: View, result: View | None, qdata: View | None, low: View | None, high: View | None,
    elements: int, limit: float,
) -> list[View] | None:  # fmt: skip
    """One output. No plan for float64, for empty tensors, and if a tensor must be copied first."""
    given = [view for view in (x, whole, result, qdata, low, high) if view is not None]
    if x.dtype not in READ or not x.numel() or not all(view.is_contiguous() for view in given):
        return None
    operands, rows, k = x.shape
    strips = -(-k // STRIP_COLUMNS)
    sums = plan.empty((operands, kernels.SUMS.value, strips), torch.float64)
    columns = plan.empty((operands, k), torch.float32)
    out = plan.empty((operands, reference.FIGURES), torch.float64)
    quantized = result is not None
    clips = quantized and math.isfinite(limit)
    plan.launch(
        kernels.strip_sums_kernel,
        operands * strips,
        (x, result or x, qdata or x, sums, columns),
        (rows, k, strips),
        {
            "LIMIT": limit, "QUANTIZED": quantized, "CLIPS": clips,
            "TILE_M": STRIP_ROWS, "TILE_N": STRIP_COLUMNS,
        },
        num_warps=STRIP_WARPS,
    )  # fmt: skip
    plan.launch(
        kernels.figures_kernel,
        operands,
        (sums, columns, whole, low or whole, high or whole, out),
        (rows, k, strips, elements),
        {"QUANTIZED": quantized, "FIELDS": reference.FIGURES, "BLOCK": BLOCK},
        num_warps=WARPS,
    )
    return [out]


operand_figures = launcher(plan_operand_figures, reference.operand_figures)
