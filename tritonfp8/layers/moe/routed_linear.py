"""Grouped linear layers whose rows are tokens at their experts: no copy of the tokens in the order of the experts.

    gathered_linear    grouped_linear(gather(hidden))
    combined_linear    combine(grouped_linear(inside))

with the same bits. The casts read the rows from where they are, so forward writes no copy of the input in high
precision, and backward none of the gradient; nor is the copy kept for backward, top_k times as large as the tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.layers.first_order import first_order
from tritonfp8.layers.moe.grouped_linear import GroupedOperands, GroupedPlan, Rows, checked, tokens_of
from tritonfp8.layers.moe.routing import Routing, sum_of_experts, weighted_sum
from tritonfp8.recipes import Recipe


def _tokens_of_rows(order: Tensor, tokens: int) -> Tensor:
    """The token of each row."""
    return order // (order.shape[0] // max(1, tokens)) if order.shape[0] else order


class _GatheredLinear(torch.autograd.Function):
    """Saves the tokens, as they came; backward casts them for ``grad_weight``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        offsets: Tensor,
        order: Tensor,
        inverse: Tensor,
        plan: GroupedPlan,
        *cached: Any,
    ) -> Tensor:
        rows = Rows(hidden, _tokens_of_rows(order, hidden.shape[0]))
        pair, _ = tokens_of(rows, offsets, plan.recipe.output.lhs, None)
        out = plan.output(rows, pair, weight, cached, offsets, bias)
        ctx.save_for_backward(
            offsets,
            order,
            inverse,
            weight if plan.needs_grad_input and (not plan.is_cached or cached[2] is None) else None,
            hidden if plan.needs_grad_weight else None,
            *(cached[2:] if plan.needs_grad_input else ()),
        )
        ctx.plan, ctx.dtype, ctx.tokens = plan, weight.dtype, hidden.shape[0]
        return ops.sealed(out, hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grads = first_order(lambda: _GatheredLinear._grads(ctx, grad_output))
        return (*grads, *[None] * (8 if ctx.plan.is_cached else 4))

    @staticmethod
    def _grads(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        plan: GroupedPlan = ctx.plan
        offsets, order, inverse, weight, hidden, *cached = ctx.saved_tensors
        grad = Rows(grad_output)
        pair, pair_t = plan.tokens_of_grad(grad, offsets)
        grad_hidden = grad_weight = None
        if plan.needs_grad_input:
            of_rows = plan.grad_input(grad, pair, weight, cached, offsets)
            grad_hidden = sum_of_experts(of_rows[inverse], ctx.tokens)
        if plan.needs_grad_weight:
            rows = Rows(hidden, _tokens_of_rows(order, ctx.tokens))
            _, kept = tokens_of(rows, offsets, None, plan.recipe.grad_weight.rhs)
            grad_weight = plan.grad_weight(grad, pair_t, rows, kept, offsets, ctx.dtype)
        return grad_hidden, grad_weight, ops.grouped_sum(grad_output, offsets) if plan.needs_grad_bias else None


class _CombinedLinear(torch.autograd.Function):
    """Saves what grouped_linear does, and the rows that it combines if the router needs a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        inside: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        top_k_weights: Tensor,
        offsets: Tensor,
        order: Tensor,
        inverse: Tensor,
        plan: GroupedPlan,
        needs_factors: bool,
        *cached: Any,
    ) -> Tensor:
        kept_spec = plan.recipe.grad_weight.rhs if plan.needs_grad_weight else None
        rows = Rows(inside)
        pair, kept = tokens_of(rows, offsets, plan.recipe.output.lhs, kept_spec)
        of_experts = plan.output(rows, pair, weight, cached, offsets, bias)
        ctx.save_for_backward(
            offsets,
            order,
            inverse,
            top_k_weights,
            of_experts if needs_factors else None,
            weight if plan.needs_grad_input and (not plan.is_cached or cached[2] is None) else None,
            inside if plan.needs_grad_weight and kept[0] is None else None,
            *kept,
            *(cached[2:] if plan.needs_grad_input else ()),
        )
        ctx.plan, ctx.dtype = plan, weight.dtype
        out = weighted_sum(of_experts[inverse], top_k_weights, inside.dtype)
        return ops.sealed(out, inside, weight, bias, top_k_weights)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grads = first_order(lambda: _CombinedLinear._grads(ctx, grad_output))
        return (*grads, *[None] * (9 if ctx.plan.is_cached else 5))

    @staticmethod
    def _grads(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        plan: GroupedPlan = ctx.plan
        offsets, order, inverse, top_k_weights, of_experts, weight, inside, kept_qdata, kept_scale, *cached = (
            ctx.saved_tensors
        )
        grad = Rows(grad_output, _tokens_of_rows(order, grad_output.shape[0]), top_k_weights.reshape(-1)[order])
        pair, pair_t = plan.tokens_of_grad(grad, offsets)
        grad_inside = plan.grad_input(grad, pair, weight, cached, offsets) if plan.needs_grad_input else None
        grad_weight = None
        if plan.needs_grad_weight:
            rows = None if inside is None else Rows(inside)
            grad_weight = plan.grad_weight(grad, pair_t, rows, (kept_qdata, kept_scale), offsets, ctx.dtype)
        grad_bias = ops.grouped_sum(grad.tensor(), offsets) if plan.needs_grad_bias else None
        grad_factors = None
        if of_experts is not None:
            grad_factors = _grad_of_factors(grad_output, of_experts[inverse], top_k_weights)
        return grad_inside, grad_weight, grad_bias, grad_factors


def _grad_of_factors(grad: Tensor, ordered: Tensor, top_k_weights: Tensor) -> Tensor:
    """The gradient of the weights of each token's experts, summed as autograd sums it."""
    dtype = torch.promote_types(ordered.dtype, top_k_weights.dtype)
    each = top_k_weights.shape[1]
    expanded = grad.to(dtype)[:, None].expand(-1, each, -1).reshape(ordered.shape)
    return (expanded * ordered).sum(1).to(top_k_weights.dtype).view(top_k_weights.shape)


# Factors that float32 holds: the casts multiply in float32.
_FACTORS = (torch.bfloat16, torch.float16, torch.float32)


def can_route(hidden: Tensor, top_k_weights: Tensor) -> bool:
    """Whether the functions below have the bits of their parts: no cast of autocast comes between these."""
    return not torch.is_autocast_enabled(hidden.device.type) and top_k_weights.dtype in _FACTORS


def gathered_linear(
    hidden: Tensor,
    weight: Tensor,
    routing: Routing,
    bias: Tensor | None,
    recipe: Recipe,
    quantized_weight: GroupedOperands | None = None,
) -> Tensor:
    """``grouped_linear`` of the rows of all experts, ``[R, N]``, from the tokens ``hidden [T, K]``.

    See :func:`can_route`.
    """
    offsets, order, inverse = routing
    x, w, b, plan, cached = checked(hidden, weight, offsets, bias, recipe, quantized_weight, order.shape[0])
    return _GatheredLinear.apply(x, w, b, offsets, order, inverse, plan, *cached)  # type: ignore[no-untyped-call]


def combined_linear(
    inside: Tensor,
    weight: Tensor,
    routing: Routing,
    bias: Tensor | None,
    top_k_weights: Tensor,
    recipe: Recipe,
    quantized_weight: GroupedOperands | None = None,
) -> Tensor:
    """The sum of the experts of each token, ``[T, N]``, from the rows ``inside [R, K]`` in which they end.

    See :func:`can_route`.
    """
    offsets, order, inverse = routing
    x, w, b, plan, cached = checked(inside, weight, offsets, bias, recipe, quantized_weight)
    needs_factors = torch.is_grad_enabled() and top_k_weights.requires_grad
    arguments = (x, w, b, top_k_weights, offsets, order, inverse, plan, needs_factors, *cached)
    return _CombinedLinear.apply(*arguments)  # type: ignore[no-untyped-call]
