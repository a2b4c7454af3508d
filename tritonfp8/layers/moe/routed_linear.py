"""Linear layers of experts whose rows are tokens at their experts: no copy of the tokens in the order of the experts.

    gathered_linear    grouped_linear(gather(hidden))
    combined_linear    combine(grouped_linear(inside))
    routed_swiglu      combined_linear(swiglu(gathered_linear(hidden)))

with the same bits. The casts read the rows from where they are, so forward writes no copy of the input in high
precision, and backward none of the gradient; nor is the copy kept for backward, top_k times as large as the tokens.
``routed_swiglu`` keeps the input of SwiGLU for backward, and casts its result and its gradient where they are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.compat.torch_private import statically_known_true
from tritonfp8.layers.first_order import first_order
from tritonfp8.layers.linear import NO_PAIR, Pair, Specs, autocast_dtype
from tritonfp8.layers.moe.grouped import GroupedOperands, GroupedPlan, Rows, checked, tokens_of
from tritonfp8.layers.moe.routing import Travel, Way, grad_of_factors, in_dtype, places_of, tokens_of_rows
from tritonfp8.recipes import Recipe
from tritonfp8.specs import QuantSpec

Grads = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Gradients of the rows, the weight and the bias of a linear layer."""


class Layer(NamedTuple):
    """A linear layer of all experts, as one of the functions below multiplies by it."""

    weight: Tensor
    bias: Tensor | None = None
    quantized_weight: GroupedOperands | None = None


def _gathered(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, way: Way, plan: GroupedPlan, cached: Sequence[Any]
) -> tuple[Tensor, Sequence[Tensor | None], list[Any]]:
    """The rows of all experts; the tokens, or the codes and scales that travelled, for ``grad_weight``; what backward
    reads of the weight (:meth:`GroupedPlan.output`).
    """
    rows, spec = Rows(hidden, tokens_of_rows(way.here.order, hidden.shape[0])), plan.recipe.output.lhs
    kept: Sequence[Tensor | None] = (hidden, None, None)
    if way.travel is None:
        pair, _ = tokens_of(rows, way.here.offsets, Specs(spec, None))
    else:
        pair = _codes_there(rows, spec, way, way.travel)
        kept = (None, *pair)
    out, of_weight = plan.output(rows, pair, weight, cached, way.there.offsets, bias)
    return out, kept if plan.needs_grad_weight else (None, None, None), of_weight


def _codes_there(rows: Rows, spec: QuantSpec | None, way: Way, travel: Travel) -> Pair:
    """The codes of picked rows where their experts are."""
    assert rows.picked is not None
    assert spec is not None
    factors = None if rows.factors is None else rows.factors[: travel.rows]
    rows = rows._replace(picked=rows.picked[: travel.rows], factors=factors)
    pair, _ = tokens_of(rows, way.here.offsets, Specs(spec, None))
    return travel.there(pair, spec, way.there)


def _columns(pair: Pair, spec: QuantSpec | None, spec_t: QuantSpec | None, offsets: Tensor) -> Pair:
    """The transposes that are made of the codes ``pair`` of groups."""
    if spec is None or spec_t is None:
        return NO_PAIR
    return ops.transpose_group_codes(*pair, offsets, *spec.args, *spec_t.args)


def _values(pair: Pair, spec: QuantSpec | None, dtype: torch.dtype) -> Rows:
    """The rows that codes stand for."""
    assert spec is not None
    return Rows(ops.dequantize(*pair, *spec.args, dtype))


def _grads_of_gathered(
    grad: Rows,
    codes: tuple[Pair, Pair],
    rows: Rows | None,
    of_rows: Pair,
    tokens: int,
    kept: Sequence[Any],
    way: Way,
    plan: GroupedPlan,
    dtype: torch.dtype,
) -> Grads:
    """Gradients from the gradient of the output, whose codes are ``codes``.

    ``rows``: None if they travelled as codes, ``of_rows``; ``kept``: see :meth:`GroupedPlan.output`; ``dtype``: of the
    weight.
    """
    (_, order, inverse), offsets, travel, (pair, pair_t) = way.here, way.there.offsets, way.travel, codes
    grad_hidden = grad_weight = None
    if plan.needs_grad_input:
        # No name keeps the rows of an all-to-all, nor their sum's: what follows finds their memory free.
        if travel is None:
            grad_rows = plan.grad_input(grad, pair, kept, offsets)
        else:
            grad_rows = travel.back(plan.grad_input(grad, pair, kept, offsets), way.there, order.shape[0])
        grad_hidden = ops.sum_of_rows(grad_rows, places_of(inverse, tokens))
        del grad_rows
    if plan.needs_grad_weight:
        spec, spec_t = plan.recipe.codes["input"], plan.recipe.grad_weight.rhs
        if rows is None:
            columns = _columns(of_rows, spec, spec_t, offsets)
            rows = _values(of_rows, spec, grad.x.dtype) if spec_t is None else None
        else:
            _, columns = tokens_of(rows, offsets, Specs(None, spec_t, spec))
        grad_weight = plan.grad_weight(grad, pair_t, rows, columns, offsets, dtype)
    return grad_hidden, grad_weight, ops.grouped_sum(grad.tensor(), offsets) if plan.needs_grad_bias else None


def _combined(
    rows: Rows,
    weight: Tensor,
    bias: Tensor | None,
    top_k_weights: Tensor,
    way: Way,
    plan: GroupedPlan,
    cached: Sequence[Any],
) -> tuple[Tensor, Tensor, Pair, list[Any]]:
    """The sums, the rows that were added, the codes of ``rows`` for ``grad_weight``, and what backward reads of the
    weight (:meth:`GroupedPlan.output`).
    """
    kept_spec = plan.recipe.grad_weight.rhs if plan.needs_grad_weight else None
    specs = Specs(plan.recipe.output.lhs, kept_spec, plan.recipe.codes["input"])
    here, there, travel = way
    pair, kept = tokens_of(rows, there.offsets, specs)
    of_experts, of_weight = plan.output(rows, pair, weight, cached, there.offsets, bias)
    if travel is not None:
        of_experts = travel.back(of_experts, there, here.order.shape[0])
    out = ops.sum_of_rows(of_experts, places_of(here.inverse, top_k_weights.shape[0]), top_k_weights)
    return in_dtype(out, rows.x.dtype), of_experts, kept, of_weight


class _OfCombined(NamedTuple):
    """Gradients of :func:`_combined`; the gradients of weight and bias are computed on request.

    The gradient of the factors comes before: nothing else reads the rows of all experts, so their memory is free then.
    ``can_wait``: what the gradient of the weight is made of takes less memory than this gradient.
    """

    rows: Tensor | None
    of_weight: Callable[[], tuple[Tensor | None, Tensor | None]]
    can_wait: bool


def _grads_of_combined(
    grad_output: Tensor,
    picked: Tensor,
    rows: Rows | None,
    columns: Pair,
    kept: Sequence[Any],
    top_k_weights: Tensor,
    way: Way,
    plan: GroupedPlan,
    dtype: torch.dtype,
) -> _OfCombined:
    """Gradients from the gradient of the output, whose rows at the experts are ``picked``.

    ``columns``: the codes of the rows that ``grad_weight`` reads; without them ``rows`` is not None.
    """
    offsets = way.there.offsets
    grad = Rows(grad_output, picked, top_k_weights.reshape(-1)[way.here.order])
    if way.travel is None:
        pair, pair_t = plan.tokens_of_grad(grad, offsets)
    else:
        grad, pair, pair_t = _grad_there(grad, way, way.travel, plan)
    grad_rows = plan.grad_input(grad, pair, kept, offsets) if plan.needs_grad_input else None

    def of_weight() -> tuple[Tensor | None, Tensor | None]:
        grad_weight = None
        if plan.needs_grad_weight:
            grad_weight = plan.grad_weight(grad, pair_t, rows, columns, offsets, dtype)
        return grad_weight, ops.grouped_sum(grad.tensor(), offsets) if plan.needs_grad_bias else None

    return _OfCombined(grad_rows, of_weight, _grows(pair_t[0], columns[0], offsets.shape[0], dtype))


def _grad_there(grad: Rows, way: Way, travel: Travel, plan: GroupedPlan) -> tuple[Rows, Pair, Pair]:
    """The gradient of the rows of all experts where these are, its codes, and the codes of its transposes."""
    offsets = way.there.offsets
    if not (plan.needs_grad_input or plan.needs_grad_weight or plan.needs_grad_bias):
        return grad, NO_PAIR, NO_PAIR
    spec, spec_t = plan.recipe.grad_input.lhs, plan.recipe.grad_weight.lhs
    dtype, width, rows = grad.x.dtype, grad.x.shape[1], way.there.order.shape[0]
    pair = _codes_there(grad, spec, way, travel)
    if plan.needs_grad_bias or (plan.needs_grad_weight and spec_t is None):
        grad = _values(pair, spec, dtype)
    else:  # Nobody reads these values.
        grad = Rows(grad.x.new_zeros(()).expand(rows, width))
    return grad, pair, _columns(pair, spec, spec_t, offsets) if plan.needs_grad_weight else NO_PAIR


def _grows(lhs: Tensor | None, rhs: Tensor | None, groups: int, dtype: torch.dtype) -> bool:
    """Whether the product of these codes for each group, in ``dtype``, takes more memory than the codes.

    False where a size that the compiler does not know decides.
    """
    if lhs is None or rhs is None:
        return False
    product = groups * lhs.shape[0] * rhs.shape[0] * dtype.itemsize
    return statically_known_true(lhs.numel() + rhs.numel() < product)


class _GatheredLinear(torch.autograd.Function):
    """Saves the tokens, as they came; backward casts them for ``grad_weight``. Of rows that travelled: their codes."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, plan: GroupedPlan, *args: Any) -> Tensor:
        way, cached = Way.of(args)
        out, kept, of_weight = _gathered(hidden, weight, bias, way, plan, cached)
        ctx.save_for_backward(*args[1:7], *kept, *of_weight)
        ctx.plan, ctx.dtype, ctx.tokens, ctx.travel = plan, weight.dtype, hidden.shape[0], way.travel
        return ops.sealed(out, hidden, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        plan: GroupedPlan = ctx.plan
        way, (hidden, qdata, scale, *kept) = Way.of((ctx.travel, *ctx.saved_tensors))
        grad = Rows(grad_output)
        rows = None if hidden is None else Rows(hidden, tokens_of_rows(way.here.order, ctx.tokens))

        def grads_of() -> Grads:
            codes = plan.tokens_of_grad(grad, way.there.offsets)
            return _grads_of_gathered(grad, codes, rows, (qdata, scale), ctx.tokens, kept, way, plan, ctx.dtype)

        grads = first_order(grads_of)
        return (*grads, *[None] * (12 if plan.is_cached else 8))


class _CombinedLinear(torch.autograd.Function):
    """Saves what grouped_linear does, and the rows that it combines if the router needs a gradient."""

    @staticmethod
    def forward(
        ctx: Any, inside: Tensor, weight: Tensor, bias: Tensor | None, top_k_weights: Tensor, plan: GroupedPlan,
        needs_factors: bool, *args: Any,
    ) -> Tensor:  # fmt: skip
        way, cached = Way.of(args)
        out, of_experts, columns, of_weight = _combined(Rows(inside), weight, bias, top_k_weights, way, plan, cached)
        ctx.save_for_backward(
            *args[1:7],
            top_k_weights,
            of_experts if needs_factors else None,
            inside if plan.needs_grad_weight and columns[0] is None else None,
            *columns,
            *of_weight,
        )
        ctx.plan, ctx.dtype, ctx.travel = plan, weight.dtype, way.travel
        return ops.sealed(out, inside, weight, bias, top_k_weights)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        plan: GroupedPlan = ctx.plan
        way, (top_k_weights, of_experts, inside, qdata, scale, *kept) = Way.of((ctx.travel, *ctx.saved_tensors), ctx)
        rows = None if inside is None else Rows(inside)
        picked = tokens_of_rows(way.here.order, grad_output.shape[0])

        def grads_of() -> tuple[Tensor | None, ...]:
            nonlocal of_experts
            factors = grad_of_factors(grad_output, of_experts, way.here.inverse, top_k_weights)
            of_experts = None
            of = _grads_of_combined(
                grad_output, picked, rows, (qdata, scale), kept, top_k_weights, way, plan, ctx.dtype
            )
            return of.rows, *of.of_weight(), factors

        return (*first_order(grads_of), *[None] * (13 if plan.is_cached else 9))


class _RoutedSwiglu(torch.autograd.Function):
    """Both linear layers of experts and SwiGLU between them."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, up: Tensor, up_bias: Tensor | None, down: Tensor, down_bias: Tensor | None,
        top_k_weights: Tensor, plans: tuple[GroupedPlan, GroupedPlan], needs_factors: bool, *args: Any,
    ) -> Tensor:  # fmt: skip
        way, cached = Way.of(args)
        first, second = plans
        of_up, of_down = cached[: len(cached) // 2], cached[len(cached) // 2 :]
        inner, kept, kept_up = _gathered(hidden, up, up_bias, way, first, of_up)
        out, of_experts, columns, kept_down = _combined(
            Rows(inner, swiglu=True), down, down_bias, top_k_weights, way, second, of_down
        )
        ctx.save_for_backward(
            *args[1:7],
            top_k_weights,
            *kept,
            inner if second.needs_grad_input or (second.needs_grad_weight and columns[0] is None) else None,
            of_experts if needs_factors else None,
            *columns,
            *kept_up,
            *kept_down,
        )
        ctx.plans, ctx.of_up, ctx.tokens = plans, len(kept_up), hidden.shape[0]
        ctx.up_dtype, ctx.down_dtype, ctx.cached, ctx.travel = up.dtype, down.dtype, len(cached), way.travel
        return ops.sealed(ops.sealed(out, hidden, up, up_bias), down, down_bias, top_k_weights)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grads = first_order(_RoutedSwiglu._grads, ctx, grad_output)
        return (*grads, *[None] * (9 + ctx.cached))

    @staticmethod
    def _grads(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        first, second = ctx.plans
        way, saved = Way.of((ctx.travel, *ctx.saved_tensors), ctx)
        top_k_weights, hidden, codes_of_rows, scale_of_rows, inner, of_experts, qdata, scale, *kept = saved
        factors = grad_of_factors(grad_output, of_experts, way.here.inverse, top_k_weights)
        del saved, of_experts
        picked, rows = tokens_of_rows(way.here.order, ctx.tokens), None if inner is None else Rows(inner, swiglu=True)
        of_down = _grads_of_combined(
            grad_output, picked, rows, (qdata, scale), kept[ctx.of_up :], top_k_weights, way, second, ctx.down_dtype
        )
        grad = None if of_down.rows is None else first.rows_of_swiglu(of_down.rows, inner, way.there.offsets)
        if grad is None:
            return (None, None, None, *of_down.of_weight(), factors)
        # Backward takes most memory while the codes of SwiGLU's gradient are written, so the smaller is kept meanwhile:
        # the gradient of the second weight, or the codes that it is made of.
        of_down = of_down._replace(rows=None)
        del inner, rows, qdata, scale
        of_weight = None if of_down.can_wait else of_down.of_weight()
        codes = first.tokens_of_grad(grad, way.there.offsets)
        of_weight = of_weight or of_down.of_weight()
        del of_down
        of_up = _grads_of_gathered(
            grad, codes, None if hidden is None else Rows(hidden, picked), (codes_of_rows, scale_of_rows), ctx.tokens,
            kept[: ctx.of_up], way, first, ctx.up_dtype,
        )  # fmt: skip
        return (*of_up, *of_weight, factors)


# Factors that float32 holds: the casts multiply in float32.
_FACTORS = (torch.bfloat16, torch.float16, torch.float32)


def can_route(hidden: Tensor, top_k_weights: Tensor) -> bool:
    """Whether the functions below have the bits of their parts: no cast of autocast comes between these."""
    return autocast_dtype(hidden.device.type) in (None, hidden.dtype) and top_k_weights.dtype in _FACTORS


def gathered_linear(hidden: Tensor, layer: Layer, way: Way, recipe: Recipe) -> Tensor:
    """``grouped_linear`` of the rows of all experts, ``[R, N]``, from the tokens ``hidden [T, K]``.

    See :func:`can_route`.
    """
    weight, bias, quantized = layer
    offsets, rows = way.there.offsets, way.there.order.shape[0]
    x, w, b, plan, cached = checked(hidden, weight, offsets, bias, recipe, quantized, rows)
    return _GatheredLinear.apply(x, w, b, plan, *way.args, *cached)  # type: ignore[no-untyped-call]


def combined_linear(inside: Tensor, layer: Layer, way: Way, top_k_weights: Tensor, recipe: Recipe) -> Tensor:
    """The sum of the experts of each token, ``[T, N]``, from the rows ``inside [R, K]`` in which they end.

    See :func:`can_route`.
    """
    weight, bias, quantized = layer
    x, w, b, plan, cached = checked(inside, weight, way.there.offsets, bias, recipe, quantized)
    needs_factors = torch.is_grad_enabled() and top_k_weights.requires_grad
    arguments = (x, w, b, top_k_weights, plan, needs_factors, *way.args, *cached)
    return _CombinedLinear.apply(*arguments)  # type: ignore[no-untyped-call]


def routed_swiglu(hidden: Tensor, up: Layer, down: Layer, way: Way, top_k_weights: Tensor, recipe: Recipe) -> Tensor:
    """The experts of each token, which are SwiGLU MLPs, ``[T, K]``, from the tokens ``hidden [T, K]``.

    Args:
        hidden: ``[T, K]``.
        up: of weight ``[E, 2 F, K]``, the gate first.
        down: of weight ``[E, K, F]``.
        way: of the tokens.
        top_k_weights: ``[T, top_k]``.
        recipe: of both layers.

    See :func:`can_route`. Saved for backward: the tokens (of rows that travelled, their codes), the output of the first
    layer, ``[T top_k, 2 F]``, the codes of what SwiGLU makes of it, and the rows of all experts if the router needs a
    gradient.
    """
    offsets, rows = way.there.offsets, way.there.order.shape[0]
    x, w_up, b_up, first, of_up = checked(hidden, up.weight, offsets, up.bias, recipe, up.quantized_weight, rows)
    # Of no rows, but of the shape, dtype and device that the rows will have.
    inside = x.new_empty((0, w_up.shape[1] // 2))
    needs_inside = first.needs_grad_input or first.needs_grad_weight or first.needs_grad_bias
    _, w_down, b_down, second, of_down = checked(
        inside, down.weight, offsets, down.bias, recipe, down.quantized_weight, rows, needs_inside
    )
    if len(of_up) != len(of_down):
        raise ValueError("either both layers of experts have quantized weights, or neither")
    plans = (first, second._replace(layer=first.layer))
    needs_factors = torch.is_grad_enabled() and top_k_weights.requires_grad
    arguments = (x, w_up, b_up, w_down, b_down, top_k_weights, plans, needs_factors)
    return _RoutedSwiglu.apply(*arguments, *way.args, *of_up, *of_down)  # type: ignore[no-untyped-call]
