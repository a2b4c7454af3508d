"""RMSNorm fused with the quantization of its result; differentiable once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.checks import require_type
from tritonfp8.layers.fused.functional import check_norm
from tritonfp8.layers.linear import (
    QuantizedInput,
    as_input,
    autocast_all,
    check_input,
    check_tensors,
    check_untransformed,
    first_order,
    folded,
    handle_of,
    input_specs,
    quantize_input,
)
from tritonfp8.layers.recompute import decided
from tritonfp8.ops import sealed
from tritonfp8.recipes import Recipe, get
from tritonfp8.specs import QuantSpec


def rms_norm(x: Tensor, weight: Tensor, eps: float, rounding: str = "output") -> Tensor:
    """RMSNorm of ``x [..., K]`` in plain torch, for readers in high precision; arguments as of the fused function."""
    check_norm(x, weight, rounding)
    normalized = F.rms_norm(x.float(), x.shape[-1:], None, eps)
    if rounding == "normalized":
        normalized = normalized.to(x.dtype).float()
    return (normalized * weight.float()).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm of ``x [M, K]`` quantized for its linears. Saves ``x``, ``weight`` and rstd (4 M bytes)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, rounding: str, spec: QuantSpec, spec_t: QuantSpec | None
    ) -> tuple[Tensor, ...]:
        orientation = "normal" if spec_t is None else "both"
        *quantized, rstd = ops.rms_norm_quantize(
            x, weight, eps, rounding, *spec.args, *(spec_t or spec).args, orientation, False
        )
        ctx.save_for_backward(x, weight, rstd)
        ctx.rounding = rounding
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*quantized)
        return sealed(handle_of(x), x, weight), *quantized

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *none: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        needs_weight = ctx.needs_input_grad[1]

        def compute() -> tuple[Tensor | None, ...]:
            x, weight, rstd = ctx.saved_tensors
            grads = ops.rms_norm_backward(grad, x, weight, rstd, ctx.rounding, None, needs_weight)
            return grads[0], grads[1] if needs_weight else None

        return *first_order(compute), None, None, None, None


def quantized_rms_norm(
    x: Tensor, weight: Tensor, eps: float, recipe: str | Recipe, rounding: str = "output"
) -> QuantizedInput:
    """RMSNorm of ``x``, quantized for the linears of ``recipe`` that read it.

    Args:
        x: ``[..., K]``, bfloat16, float16 or float32.
        weight: ``[K]``, of those dtypes.
        eps: added to the mean square.
        recipe: a name or a :class:`~tritonfp8.Recipe` whose three GEMMs are quantized.
        rounding: ``"output"`` (``torch.nn.RMSNorm``) or ``"normalized"`` (Llama in transformers).

    Returns:
        A :class:`QuantizedInput` in the dtype of ``x``. Under autocast to another dtype the norm runs in plain torch.
        Its result is then cast and quantized, as a linear after it would do.

    Raises:
        TypeError: another dtype of ``x``.
        ValueError: a ``weight`` that does not fit, an unknown rounding, or a recipe with a GEMM in high precision.
        RuntimeError: in a second derivative.
    """
    check_tensors(x=x, weight=weight)
    check_untransformed()
    require_type("eps", eps, float | int, "a float")
    recipe = decided(weight, get(recipe))
    spec, spec_t = input_specs(recipe)
    check_input(x)
    check_norm(x, weight, rounding)
    (cast,) = autocast_all(x.device.type, x)
    assert cast is not None
    if cast.dtype != x.dtype:
        return quantize_input(rms_norm(x, weight, eps, rounding), recipe)
    kept = spec_t if torch.is_grad_enabled() else None
    results = _RMSNorm.apply(folded(x), weight, eps, rounding, spec, kept)  # type: ignore[no-untyped-call]
    return as_input(x, results, spec, kept)
