"""A linear layer and its gradients as two ops, to the bits of the eager layer; for graphs that are traced.

See :mod:`tritonfp8.ops.tracing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.compat import counting
from tritonfp8.layers.first_order import refuse_second_derivative
from tritonfp8.layers.linear.dispatch import local_linear
from tritonfp8.layers.linear.function import LinearPlan, Saved, cached_for_backward, gradients
from tritonfp8.layers.linear.operands import LOCAL, Specs
from tritonfp8.layers.linear.weight_source import CASTS, Operands, source_for
from tritonfp8.ops import implement, saved
from tritonfp8.recipes import Recipe, recipe_of
from tritonfp8.specs import QuantSpec
from tritonfp8.specs.quantized import Quantized


def _quantized(pair: Sequence[Tensor | None], spec: QuantSpec | None) -> Quantized | None:
    qdata, scale = pair
    return None if qdata is None or scale is None or spec is None else Quantized(qdata, scale, spec)


def _operands(recipe: Recipe, cached: Sequence[Tensor | None]) -> Operands | None:
    found = _quantized(cached[:2], recipe.output.rhs), _quantized(cached[2:], recipe.grad_input.rhs)
    return None if found == (None, None) else found


def _forward(
    input: Tensor,
    weight: Tensor,
    recipe: str,
    bias: Tensor | None = None,
    qdata: Tensor | None = None,
    scale: Tensor | None = None,
    qdata_t: Tensor | None = None,
    scale_t: Tensor | None = None,
) -> Tensor:
    how = recipe_of(recipe)
    cached = _operands(how, (qdata, scale, qdata_t, scale_t))
    # The operands have the compute dtype already: an autocast around the graph must not change it.
    with torch.no_grad(), torch.autocast(input.device.type, enabled=False):
        return local_linear(input, weight, bias, how, quantized_weight=cached)


def _rows(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else torch.atleast_2d(x).flatten(0, -2)


def _backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    recipe: str,
    needs_input: bool,
    needs_weight: bool,
    needs_bias: bool,
    qdata: Tensor | None = None,
    scale: Tensor | None = None,
    qdata_t: Tensor | None = None,
    scale_t: Tensor | None = None,
) -> list[Tensor]:
    how = recipe_of(recipe)
    cached, cached_t = (qdata, scale), (qdata_t, scale_t)
    source, is_cached = source_for(how, weight, CASTS), _operands(how, (*cached, *cached_t)) is not None
    plan = LinearPlan(how, needs_input, needs_weight, is_cached, LOCAL, source)
    if counting.is_logging:
        plan = plan._replace(layer=counting.take_callers()[0])
    grad, rows = _rows(grad_output), _rows(input)
    with torch.no_grad(), torch.autocast(input.device.type, enabled=False):
        spec = how.grad_weight.rhs if needs_weight else None
        input_pair = LOCAL.input(rows, Specs(None, spec, how.codes["input"]))[1]
        codes = how.codes["input"]
        if needs_weight and spec is None and codes is not None:
            # A GEMM in high precision reads the values of the codes.
            input_pair = LOCAL.input(rows, Specs(codes, None))[0]
        kept = cached_for_backward(plan, cached, cached_t)
        grad_input, grad_weight, grad_bias = gradients(
            plan, grad, Saved(weight, None, rows, input_pair, kept, (input.dtype, weight.dtype)), needs_bias
        )
        results = [None if grad_input is None else grad_input.reshape(input.shape), grad_weight, grad_bias]
    return [x for x in results if x is not None]


def _formula(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    input, weight, recipe, _, *cached = saved(ctx)
    # It leaves out the last arguments of the call that are at their defaults.
    given = ctx.needs_input_grad
    needs = given[0], given[1], len(given) > 3 and given[3]
    found = iter(ops.whole_linear_backward(grad_output, input, weight, recipe, *needs, *cached))
    grad_input, grad_weight, grad_bias = (next(found) if need else None for need in needs)
    return (grad_input, grad_weight, None, grad_bias, None, None, None, None)[: len(given)]


implement("whole_linear", _forward, _formula)
implement("whole_linear_backward", _backward, refuse_second_derivative)
