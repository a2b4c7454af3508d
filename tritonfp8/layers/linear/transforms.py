"""A linear layer inside the transforms of ``torch.func``: grad, vmap, jacrev, and what is made of them.

A transform takes an ``autograd.Function`` only in the form with ``setup_context``, which takes more host time. So eager
layers have the other form, and this one runs while a transform is open. Its results equal the eager layer's to the bit:
``vmap`` computes one sample at a time, like a loop over the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.compat import counting
from tritonfp8.layers.first_order import refuse_second_derivative
from tritonfp8.layers.linear.weight_source import CASTS, Operands, pair_of, weight_operands
from tritonfp8.layers.unsupported import refuse_forward_mode
from tritonfp8.ops import each_sample
from tritonfp8.recipes import Recipe

_Cached = tuple[Tensor | None, ...]
"""Data and scale of the weight, then of its transpose."""


def _cast(weight: Tensor, recipe: Recipe, needs_grad_input: bool) -> _Cached:
    with torch.no_grad():
        operands = weight_operands(weight, recipe, needs_grad_input, CASTS)
    return *pair_of(operands[0]), *pair_of(operands[1])


class _Gradients(torch.autograd.Function):
    """The gradients of :class:`_LinearInTransform` that are needed. They have no derivative."""

    @staticmethod
    def forward(
        grad_output: Tensor,
        input: Tensor,
        weight: Tensor,
        recipe: Recipe,
        layer: Any,
        needs: tuple[bool, bool, bool],
        *cached: Tensor | None,
    ) -> tuple[Tensor, ...]:
        if layer is not None:
            counting.resume(layer)
        return tuple(ops.whole_linear_backward(grad_output, input, weight, *recipe.args, *needs, *cached))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        refuse_second_derivative()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_second_derivative()

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        weight, recipe, needs, is_cached = args[2], args[3], args[5], args[6] is not None or args[8] is not None
        if in_dims[2] is None and needs[0] and not is_cached and recipe.grad_input.rhs is not None:
            # All samples share the weight, so it is quantized once.
            args, in_dims = (*args[:6], *_cast(weight, recipe, True)), (*in_dims[:6], *[None] * 4)
        dims = tuple(dim if isinstance(x, Tensor) else None for x, dim in zip(args, in_dims, strict=True))
        return each_sample(_Gradients.apply, info.batch_size, dims, args)


class _LinearInTransform(torch.autograd.Function):
    """The op ``whole_linear`` in the form that transforms take; it saves weight and input in high precision."""

    @staticmethod
    def forward(
        input: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, layer: Any, *cached: Tensor | None
    ) -> Tensor:
        if layer is not None:
            counting.resume(layer)
        return ops.whole_linear(input, weight, *recipe.args, bias, *cached)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        input, weight, _, ctx.recipe, ctx.layer, *cached = inputs
        ctx.save_for_backward(input, weight, *cached)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, *cached = ctx.saved_tensors
        needs = tuple(ctx.needs_input_grad[:3])
        grads = _Gradients.apply(  # type: ignore[no-untyped-call]
            grad_output, input, weight, ctx.recipe, ctx.layer, needs, *cached
        )
        found = iter(grads)
        return *(next(found) if need else None for need in needs), *[None] * 6

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_forward_mode()

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        input, weight, _, recipe = args[:4]
        if in_dims[1] is None and args[5] is None and recipe.output.rhs is not None:
            args, in_dims = (*args[:5], *_cast(weight, recipe, input.requires_grad)), (*in_dims[:5], *[None] * 4)
        dims = tuple(dim if isinstance(x, Tensor) else None for x, dim in zip(args, in_dims, strict=True))
        return each_sample(_LinearInTransform.apply, info.batch_size, dims, args)


def transformed(
    input: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, quantized_weight: Operands | None
) -> Tensor:
    """:func:`linear` of checked operands in the dtype to compute in, inside a transform."""
    layer = counting.take_callers()[0] if counting.is_logging else None
    cached = (None, None) if quantized_weight is None else quantized_weight
    out: Tensor = _LinearInTransform.apply(  # type: ignore[no-untyped-call]
        input, weight, bias, recipe, layer, *pair_of(cached[0]), *pair_of(cached[1])
    )
    return out
