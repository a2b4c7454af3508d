"""What the ops of :mod:`tritonfp8.traced_op` do: a linear layer and its gradients, to the bits of the eager layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonfp8 import traced_op
from tritonfp8.linear import Plan, Saved, computed_linear, gradients, held_for_backward
from tritonfp8.operands import NO_PAIR, WHOLE, Operands, Pair
from tritonfp8.quantized import Quantized
from tritonfp8.recipes import Recipe, recipe_of
from tritonfp8.second_derivative import refuse_second_derivative


def _as_operands(recipe: Recipe, held: Sequence[Tensor], held_t: Sequence[Tensor]) -> Operands | None:
    if not held and not held_t:
        return None
    normal, transposed = recipe.output.rhs, recipe.grad_input.rhs
    return (
        Quantized(held[0], held[1], normal) if held and normal else None,
        Quantized(held_t[0], held_t[1], transposed) if held_t and transposed else None,
    )


def _pair(tensors: Sequence[Tensor]) -> Pair:
    return (tensors[0], tensors[1]) if tensors else NO_PAIR


def _forward(
    input: Tensor, weight: Tensor, bias: list[Tensor], held: list[Tensor], held_t: list[Tensor], recipe: str
) -> Tensor:
    how = recipe_of(recipe)
    # The operands have the dtype to compute in: an autocast around the graph must not choose another.
    with torch.no_grad(), torch.autocast(input.device.type, enabled=False):
        return computed_linear(
            input, weight, bias[0] if bias else None, how, quantized_weight=_as_operands(how, held, held_t)
        )


def _forward_fake(input: Tensor, weight: Tensor, *args: Any) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


def _rows(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else torch.atleast_2d(x).flatten(0, -2)


def _backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    held: list[Tensor],
    held_t: list[Tensor],
    recipe: str,
    needs_input: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> list[Tensor]:
    how = recipe_of(recipe)
    plan = Plan(how, needs_input, needs_weight, bool(held or held_t), WHOLE)
    grad, rows = _rows(grad_output), _rows(input)
    with torch.no_grad(), torch.autocast(input.device.type, enabled=False):
        spec = how.grad_weight.rhs if needs_weight else None
        input_pair = WHOLE.quantize("input", rows, None, spec)[1]
        kept = held_for_backward(plan, _pair(held), _pair(held_t))
        saved = Saved(weight, None, rows, input_pair, kept, (input.dtype, weight.dtype))
        grad_input, grad_weight = gradients(plan, grad, saved)
        results = [None if grad_input is None else grad_input.reshape(input.shape), grad_weight]
        results.append(grad.sum(0) if needs_bias else None)
    return [x for x in results if x is not None]


def _backward_fake(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    held: list[Tensor],
    held_t: list[Tensor],
    recipe: str,
    *needs: bool,
) -> list[Tensor]:
    shapes = input.shape, weight.shape, weight.shape[:1]
    return [input.new_empty(shape) for shape, need in zip(shapes, needs, strict=True) if need]


def _formula(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
    input, weight, *rest = ctx.saved_tensors
    _, _, with_bias, held, held_t = ctx.counts
    rest = rest[with_bias:]
    needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    needs = (needs_input, needs_weight, any(needs_bias))
    found = iter(
        traced_op.call_backward(grad_output, input, weight, rest[:held], rest[held:], *ctx.options, *needs)
        if any(needs)
        else ()
    )
    grad_input, grad_weight, grad_bias = (next(found) if need else None for need in needs)
    return grad_input, grad_weight, [grad_bias] * with_bias, [None] * held, [None] * held_t, None


traced_op.implement("whole_linear", _forward, _forward_fake, _formula)
traced_op.implement("whole_linear_backward", _backward, _backward_fake, refuse_second_derivative)
