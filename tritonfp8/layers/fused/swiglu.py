"""The SwiGLU MLP with its activation fused with quantization; differentiable once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tritonfp8 import counting, ops
from tritonfp8.checks import check_strided, require_type, shown
from tritonfp8.layers.linear import (
    NO_PAIR,
    LinearPlan,
    Operands,
    Pair,
    QuantizedInput,
    autocast_all,
    cached_for_backward,
    check_linear,
    check_reader,
    check_tensors,
    check_whole,
    first_order,
    folded,
    input_specs,
    is_fusable,
    multiply,
    pair_of,
    provider_of,
    quantize_input,
    weight_pairs,
    weight_t,
)
from tritonfp8.layers.linear import linear as plain_linear
from tritonfp8.layers.recompute import decided
from tritonfp8.ops import sealed
from tritonfp8.recipes import Recipe, get
from tritonfp8.specs import QuantSpec


def _pairs(results: list[Tensor], spec: object, spec_t: object) -> tuple[Pair, Pair]:
    """``(normal, transposed)`` of what a fused op returned, each with Nones where its spec is None."""
    rest = list(results)
    normal = (rest.pop(0), rest.pop(0)) if spec is not None else (None, None)
    transposed = (rest.pop(0), rest.pop(0)) if spec_t is not None else (None, None)
    return normal, transposed


def _fused_args(spec: QuantSpec | None, spec_t: QuantSpec | None) -> tuple[Any, ...]:
    """Specs, orientation and keep of a fused op."""
    either = spec or spec_t
    assert either is not None
    orientation = "both" if spec and spec_t else "normal" if spec else "transposed"
    return *(spec or either).args, *(spec_t or either).args, orientation, False


def _product(
    plan: LinearPlan, gemm: str, lhs: Pair, rhs: Pair, dtype: torch.dtype, residual: Tensor | None = None
) -> Tensor:
    """The GEMM of this name of one of the three linears."""
    if plan.layer is not None:
        counting.announce(plan.layer, gemm)
    return multiply(getattr(plan.recipe, gemm), lhs, rhs, None, dtype, residual)


class _SwiGLU(torch.autograd.Function):
    """``(silu(x gate.T) * (x up.T)) down.T`` of a quantized input.

    Saved, for M rows and F features inside: gate and up, 4 M F bytes in bf16; the input transposed in 8 bits, which
    other linears may share. ``silu(gate) * up``, which the gradient of ``down`` reads transposed, is recomputed from
    them to the same bits; if nothing else needs gate and up, it is saved in their place. The gradients of gate and up
    exist in 8 bits only.
    """

    @staticmethod
    def forward(
        ctx: Any, handle: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor,
        plans: Sequence[LinearPlan], *quantized: Tensor | None,
    ) -> Tensor:  # fmt: skip
        input_pair, kept, *pairs = ((quantized[i], quantized[i + 1]) for i in range(0, len(quantized), 2))
        weights, cached = pairs[::2], pairs[1::2]
        recipe, dtype = plans[0].recipe, handle.dtype
        gate, up = (
            _product(plan, "output", input_pair, weight, dtype)
            for plan, weight in zip(plans[:2], weights[:2], strict=True)
        )
        spec, spec_t = input_specs(recipe)
        inner = plans[2].needs_grad_input
        keep = spec_t if plans[2].needs_grad_weight and not inner else None
        hidden, hidden_t = _pairs(ops.silu_mul_quantize(gate, up, *_fused_args(spec, keep)), spec, keep)
        out = _product(plans[2], "output", hidden, weights[2], dtype)
        cached = [cached_for_backward(*each) for each in zip(plans, weights, cached, strict=True)]
        read = [
            weight if plan.needs_grad_input and pair[0] is None else None
            for plan, weight, pair in zip(plans, (gate_weight, up_weight, down_weight), cached, strict=True)
        ]
        if not any(plan.needs_grad_weight for plan in plans[:2]):
            kept = NO_PAIR
        ctx.save_for_backward(
            *((gate, up) if inner else NO_PAIR), *read, *kept, *hidden_t, *(t for pair in cached for t in pair)
        )
        ctx.plans, ctx.dtypes = plans, (dtype, down_weight.dtype)
        return sealed(out, handle, gate_weight, up_weight, down_weight)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grads = first_order(lambda: _SwiGLU._grads(ctx, grad_output))
        # The plans and 16 quantized tensors have none.
        return *grads, *[None] * 17

    @staticmethod
    def _grads(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, *saved = ctx.saved_tensors
        weights, kept, hidden_t = saved[:3], (saved[3], saved[4]), (saved[5], saved[6])
        cached = [(saved[i], saved[i + 1]) for i in (7, 9, 11)]
        plans: Sequence[LinearPlan] = ctx.plans
        recipe, (dtype, weight_dtype) = plans[0].recipe, ctx.dtypes
        inner, down = plans[:2], plans[2]
        left = recipe.grad_input.lhs if down.needs_grad_input else None
        right = recipe.grad_weight.lhs if down.needs_grad_weight else None
        pair, pair_t = down.provider.grad_output(grad_output, left, right)
        grad_down = grad_input = None
        grads: list[Tensor | None] = [None, None]
        if down.needs_grad_weight:
            if gate is not None:
                again = ops.silu_mul_quantize(gate, up, *_fused_args(None, recipe.grad_weight.rhs))
                hidden_t = (again[0], again[1])
            grad_down = _product(down, "grad_weight", pair_t, hidden_t, weight_dtype)
        if left is None:
            return grad_input, *grads, grad_down
        rhs = weight_t(down, grad_output, weights[2], cached[2])
        grad_hidden = _product(down, "grad_input", pair, rhs, dtype)
        spec = left if inner[0].needs_grad_input else None
        spec_t = recipe.grad_weight.lhs if any(plan.needs_grad_weight for plan in inner) else None
        stacked = ops.silu_mul_backward_quantize(grad_hidden, gate, up, *_fused_args(spec, spec_t))
        for i, plan in enumerate(inner):
            side, side_t = _pairs([t[i] for t in stacked], spec, spec_t)
            if plan.needs_grad_input:
                rhs = weight_t(plan, grad_output, weights[i], cached[i])
                grad_input = _product(plan, "grad_input", side, rhs, dtype, grad_input)
            if plan.needs_grad_weight:
                grads[i] = _product(plan, "grad_weight", side_t, kept, weight_dtype)
        return grad_input, *grads, grad_down


def _swiglu_by_linears(
    x: Tensor, weights: Sequence[Tensor], recipe: Recipe, cached: Sequence[Operands | None]
) -> Tensor:
    layers = counting.take_callers(3) if counting.is_logging else ()

    def one(x: Tensor, i: int) -> Tensor:
        if layers and layers[i] is not None:
            counting.resume(layers[i])
        return plain_linear(x, weights[i], None, recipe, quantized_weight=cached[i])

    return one(F.silu(one(x, 0)) * one(x, 1), 2)


def _check_mlp(weights: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Raise unless the weights of gate, up and down go together; gate and up fit the input already."""
    check_strided("down_weight", weights[2])
    inner = weights[0].shape[0]
    fits = weights[1].shape[0] == inner and weights[2].ndim == 2 and weights[2].shape[1] == inner
    if not fits or weights[2].dtype != dtype:
        raise ValueError(
            f"swiglu needs gate_weight and up_weight [F, K] and down_weight [N, F] of one dtype; "
            f"got {', '.join(f'{w.dtype} {tuple(w.shape)}' for w in weights)}"
        )


def swiglu(
    input: Tensor | QuantizedInput,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    recipe: str | Recipe = "rowwise",
    *,
    quantized_weights: Sequence[Operands | None] = (None, None, None),
) -> Tensor:
    """The SwiGLU MLP, ``(silu(x gate_weight.T) * (x up_weight.T)) down_weight.T``, its nine GEMMs by ``recipe``.

    Args:
        input: ``[..., K]``, a tensor, or what :func:`quantized_rms_norm` made of one by the same recipe.
        gate_weight, up_weight: ``[F, K]``, in the dtype of the input (or any where autocast is on).
        down_weight: ``[N, F]``, likewise.
        recipe: a name or a :class:`~tritonfp8.Recipe`. One that keeps a GEMM in high precision runs as three linears
            and takes a tensor only.
        quantized_weights: of the three, each as of :func:`tritonfp8.functional.linear`.

    Returns:
        ``[..., N]`` in the dtype of the input.

    Raises:
        TypeError: dtypes that differ, or a distributed tensor.
        ValueError: shapes or specs that do not fit together.
        RuntimeError: in a second derivative.
    """
    check_tensors(gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight)
    require_type("input", input, Tensor | QuantizedInput, "a torch.Tensor or a QuantizedInput")
    if not isinstance(quantized_weights, tuple | list) or len(quantized_weights) != 3:
        raise TypeError(f"quantized_weights must be three, of gate, up and down; got {shown(quantized_weights)}")
    recipe = decided(down_weight, get(recipe))
    given = (gate_weight, up_weight, down_weight)
    if not is_fusable(recipe) and isinstance(input, Tensor):
        return _swiglu_by_linears(input, given, recipe, quantized_weights)
    check_whole(*given)
    if isinstance(input, Tensor):
        input = quantize_input(input, recipe)
    weights = [w for w in autocast_all(input.device.type, *given) if w is not None]
    for weight in weights[:2]:
        check_linear(input.handle, weight, None)
    _check_mlp(weights, input.dtype)
    grad = torch.is_grad_enabled()
    needs_input, *needs = (grad and t.requires_grad for t in (input.handle, *weights))
    check_reader(input, recipe, needs[0] or needs[1])
    needs_inputs = (needs_input, needs_input, needs_input or needs[0] or needs[1])
    layers = counting.take_callers(3) if counting.is_logging else (None, None, None)
    plans = tuple(
        LinearPlan(recipe, needs_input, needs_weight, cached is not None, provider_of(weight), layer=layer)
        for weight, needs_input, needs_weight, cached, layer in zip(
            weights, needs_inputs, needs, quantized_weights, layers, strict=True
        )
    )
    pairs = [weight_pairs(*each) for each in zip(weights, plans, quantized_weights, strict=True)]
    flat = [t for of_weight in pairs for pair in of_weight[:2] for t in pair]
    out: Tensor = _SwiGLU.apply(  # type: ignore[no-untyped-call]
        folded(input.handle), *weights, plans, *pair_of(input.normal), *pair_of(input.transposed), *flat
    )
    return out.reshape(*input.shape[:-1], weights[2].shape[0])
