"""GEMMs of MX operands where no tensor core takes them: dequantize both to bf16, and multiply by torch's GEMM.

A code times its scale has at most four significant bits, so bf16 holds it exactly from 2^-130 (e5m2: 2^-131) on. Below
that, where bf16 is subnormal, it is rounded once, as :func:`tritonfp8.dequantize` to bf16 does. From 2^128 on it is
infinite, as in the float32 of the reference. torch's GEMM is cuBLAS, with float32 sums.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tritonfp8.kernels.cast.widen import widen_kernel
from tritonfp8.launch.executor import planned
from tritonfp8.launch.gemms.operands import WIDE, GemmOperands, plan_reduce
from tritonfp8.launch.plan import MAX_OFFSET, Planner, View
from tritonfp8.specs import BLOCK_1X32
from tritonfp8.tuning import cast_tiles

# cuBLAS reads rows fastest that start at multiples of 16 bytes.
ROW_UNIT = 8


def plan_operand(plan: Planner, codes: View, scale: View) -> View:
    """One operand in bf16, its rows K-contiguous and aligned."""
    m, k = codes.shape
    out = plan.empty((m, k), WIDE, (max(1, -(-k // ROW_UNIT)) * ROW_UNIT, 1))
    if out.numel():
        tile = cast_tiles.WIDEN
        plan.launch(
            widen_kernel,
            tile.programs(m * -(-k // BLOCK_1X32[1]), tile.n),
            (codes, scale.retyped(torch.uint8), out),
            (m, k, *codes.strides, *scale.strides, out.strides[0]),
            {"SCALE_K": BLOCK_1X32[1], "BLOCKS": tile.m},
            **tile.options(),
        )
    return out


def too_many_scales(a_scale: Tensor, b_scale: Tensor) -> ValueError:
    """The error of a GEMM whose scales kernels cannot count in 32 bits."""
    return ValueError(
        f"scales must have fewer than 2^31 elements; got {tuple(a_scale.shape)} and {tuple(b_scale.shape)}: "
        "multiply parts of the operands"
    )


def plan_operands(plan: Planner, a: View, a_scale: View, b: View, b_scale: View) -> list[View] | None:
    """Outputs: ``a`` and ``b`` in bf16. No plan if there are too many scales."""
    if max(a_scale.numel(), b_scale.numel()) >= MAX_OFFSET:
        return None
    return [plan_operand(plan, a, a_scale), plan_operand(plan, b, b_scale)]


def plan_epilogue(
    plan: Planner, sums: View, bias: View | None, residual: View | None, out: View, activation: str | None
) -> list[View]:
    """No output: writes ``out``."""
    gemm = GemmOperands(sums, None, None, sums, None, None, bias, out, "precise", activation, residual)
    plan_reduce(plan, gemm, sums, sums.shape[0], 1)
    return []


# The setting is the process's. Without a lock, one thread would restore it before another has started its GEMM.
_setting = threading.Lock()


@contextmanager
def _sums_in_float32() -> Iterator[None]:
    """Keep cuBLAS from adding up the parts of a split K in bf16, which torch allows by default.

    A GEMM of torch that another thread starts meanwhile is at most more precise.
    """
    settings = torch.backends.cuda.matmul
    with _setting:
        allowed = settings.allow_bf16_reduced_precision_reduction
        # Newer versions of torch keep two settings under one name.
        split = getattr(settings, "allow_bf16_reduced_precision_reduction_split_k", None)
        if allowed:
            settings.allow_bf16_reduced_precision_reduction = False if split is None else (False, split)
        try:
            yield
        finally:
            if allowed:
                settings.allow_bf16_reduced_precision_reduction = allowed if split is None else (allowed, split)


def _multiply(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``out = a @ b.T + bias``. Variants with ``out`` know no autocast, which would change the dtype of others."""
    if not a.is_cuda:
        # Interpreted kernels run on a CPU, where torch returns the dtype of the operands only.
        a, b = a.to(out.dtype), b.to(out.dtype)
    with _sums_in_float32():
        if bias is not None:
            torch.addmm(bias, a, b.t(), out=out)
        elif a.dtype == out.dtype:
            torch.mm(a, b.t(), out=out)
        else:
            torch.mm(a, b.t(), out_dtype=out.dtype, out=out)


def _has_gemm(bias: Tensor | None, out_dtype: torch.dtype) -> bool:
    """Whether one GEMM of torch returns this from bf16 operands."""
    if bias is None:
        return out_dtype in (WIDE, torch.float32)
    return out_dtype == bias.dtype == WIDE and bias.is_contiguous()


def scaled_matmul(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None,
) -> Tensor:
    """As :func:`tritonfp8.reference.scaled_matmul` with MX operands; ``out`` as in the launch of other GEMMs.

    The bf16 operands take 2 (M + N) K bytes while the GEMM runs. An activation, a residual, a bias in another dtype and
    an output in float16 take a float32 sum first, 4 M N bytes.

    Raises:
        ValueError: an operand has 2^31 scales or more.
    """
    if out is None:
        out = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
    if not out.numel():
        return out
    operands = planned(plan_operands, (a, a_scale, b, b_scale), ())
    if operands is None:
        raise too_many_scales(a_scale, b_scale)
    wide_a, wide_b = operands
    if activation is None and residual is None and _has_gemm(bias, out_dtype):
        _multiply(wide_a, wide_b, bias, out)
        return out
    sums = torch.empty(out.shape, dtype=torch.float32, device=a.device)
    _multiply(wide_a, wide_b, None, sums)
    planned(plan_epilogue, (sums, None if bias is None else bias.contiguous(), residual, out), (activation,))
    return out
