"""The autograd function of a linear layer: which operands its three GEMMs read, what it saves, how gradients flow."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.layers.linear.first_order import first_order
from tritonfp8.layers.linear.operands import (
    NO_PAIR,
    OperandProvider,
    Operands,
    Pair,
    check_held,
    pair_of,
    serves_both,
)
from tritonfp8.ops import sealed
from tritonfp8.recipes import Gemm, Recipe


def multiply(
    gemm: Gemm, lhs: Pair, rhs: Pair, bias: Tensor | None, out_dtype: torch.dtype, residual: Tensor | None = None
) -> Tensor:
    """``lhs @ rhs.T + bias + residual`` on operands that are quantized as ``gemm`` says."""
    assert gemm.lhs is not None
    assert gemm.rhs is not None
    return ops.scaled_matmul(
        lhs[0], lhs[1], *gemm.lhs.args, rhs[0], rhs[1], *gemm.rhs.args,
        bias, None, residual, out_dtype, gemm.accumulation,
    )  # fmt: skip


class LinearPlan(NamedTuple):
    """What a linear layer computes besides its output, and by which recipe."""

    recipe: Recipe
    needs_grad_input: bool
    needs_grad_weight: bool
    weight_is_held: bool
    """Somebody keeps the quantized weight: grad_input reads that, and not the weight."""
    provider: OperandProvider
    casts_input_again: bool = False
    """grad_weight's operand is cast in backward, from the input, which a compiler may compute anew or have anyway."""
    no_op_has_gradient: bool = False
    """There is no op that carries this layer's gradients into a graph; see :func:`tritonfp8.ops.sealed`."""


class _Linear(torch.autograd.Function):
    """``input [M, K] @ weight [N, K].T + bias`` by a recipe, on operands that are quantized already.

    Only the GEMMs whose result somebody needs are run, and only what they read is saved: ``input.T`` quantized for
    grad_weight (M K bytes and scales, in place of 2 M K bytes of bf16), or the input itself where the recipe keeps
    grad_weight in high precision; for grad_input the weight, which is alive anyway, or under autocast its cast, and
    what other ranks said about it: asked for in backward, that would depend on the weight alone, and the compiler of
    each rank would choose by itself in which of the two graphs the ranks talk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: LinearPlan,
        weight_amax_t: Tensor | None,
        *quantized: Tensor | None,
    ) -> Tensor:
        input_pair, kept, weight_pair, held = ((quantized[i], quantized[i + 1]) for i in range(0, 8, 2))
        recipe = plan.recipe
        if recipe.output.rhs is not None:
            out = multiply(recipe.output, input_pair, weight_pair, bias, input.dtype)
        else:
            out = ops.matmul(input, weight)
            if bias is not None:
                out = out + bias
        held = held_for_backward(plan, weight_pair, held)
        keep_weight = plan.needs_grad_input and held[0] is None
        keep_input = plan.needs_grad_weight and kept[0] is None
        ctx.save_for_backward(
            weight if keep_weight else None, weight_amax_t, input if keep_input else None, *kept, *held
        )
        ctx.plan = plan
        ctx.needs_grad_bias = bias is not None and bias.requires_grad
        ctx.dtypes = (input.dtype, weight.dtype)
        return sealed(out, input, weight, bias) if plan.no_op_has_gradient else out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return (*first_order(lambda: _Linear._grads(ctx, grad_output)), *[None] * 10)

    @staticmethod
    def _grads(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        weight, weight_amax_t, input, input_qdata, input_scale, *held = ctx.saved_tensors
        saved = Saved(weight, weight_amax_t, input, (input_qdata, input_scale), (held[0], held[1]), ctx.dtypes)
        grad_bias = grad_output.sum(0) if ctx.needs_grad_bias else None
        return *gradients(ctx.plan, grad_output, saved), grad_bias


class Saved(NamedTuple):
    """What backward reads; each None where no GEMM of the plan does."""

    weight: Tensor | None
    weight_amax_t: Tensor | None
    input: Tensor | None
    input_pair: Pair
    """The input transposed, quantized for grad_weight."""
    held: Pair
    """Of a weight that somebody holds, see :func:`held_for_backward`."""
    dtypes: tuple[torch.dtype, torch.dtype]
    """Of the input and the weight, and so of their gradients."""


def gradients(plan: LinearPlan, grad_output: Tensor, saved: Saved) -> tuple[Tensor | None, Tensor | None]:
    """``(grad_input, grad_weight)`` of ``grad_output [M, N]``, each None where the plan needs none."""
    recipe, input = plan.recipe, saved.input
    grad_input = grad_weight = None
    pair, pair_t = plan.provider.grad_output(
        grad_output,
        recipe.grad_input.lhs if plan.needs_grad_input else None,
        recipe.grad_weight.lhs if plan.needs_grad_weight else None,
    )
    if plan.needs_grad_input:
        if recipe.grad_input.rhs is not None:
            weight_pair = weight_t(plan, grad_output, saved.weight, saved.held, saved.weight_amax_t)
            grad_input = multiply(recipe.grad_input, pair, weight_pair, None, saved.dtypes[0])
        else:
            assert saved.weight is not None
            grad_input = ops.matmul(grad_output, saved.weight.t())
    if plan.needs_grad_weight:
        if recipe.grad_weight.rhs is not None:
            input_pair = saved.input_pair
            if plan.casts_input_again:
                assert input is not None
                anew = _computed_anew(input)
                input_pair = plan.provider.input(anew, None, recipe.grad_weight.rhs)[1]
            grad_weight = multiply(recipe.grad_weight, pair_t, input_pair, None, saved.dtypes[1])
        else:
            assert input is not None
            grad_weight = ops.matmul(grad_output.t(), input.t())
    return grad_input, grad_weight


def _computed_anew(input: Tensor) -> Tensor:
    """``input`` to the bit, as a compiler computes it anew.

    Torch's partitioner saves what backward reads in an op that nothing is fused into: were the input itself cast, that
    would be the input or its cast. The two passes are fused into what computes the input.
    """
    return input.neg().neg()


def weight_t(
    plan: LinearPlan, grad_output: Tensor, weight: Tensor | None, held: Pair, amax_t: Tensor | None = None
) -> Pair:
    """The transposed weight for grad_input: the held one, the transpose of the held one, or quantized now."""
    qdata, scale = held
    if qdata is not None and scale is not None:
        return (qdata.t().contiguous(), scale.t().contiguous()) if serves_both(plan.recipe) else held
    spec_t = plan.recipe.grad_input.rhs
    assert weight is not None
    assert spec_t is not None
    return plan.provider.weight_t(weight, spec_t, amax_t, grad_output)


def held_for_backward(plan: LinearPlan, weight_pair: Pair, held: Pair) -> Pair:
    """What to save of a weight that somebody holds, for :func:`weight_t`; nothing of any other."""
    if not plan.weight_is_held:
        return NO_PAIR
    return weight_pair if serves_both(plan.recipe) else held


def weight_pairs(
    weight: Tensor, plan: LinearPlan, quantized_weight: Operands | None
) -> tuple[Pair, Pair, Tensor | None]:
    """The weight as ``output`` reads it, cached for ``grad_input`` if the caller has it, and what :meth:`weight` adds.

    The last is the reduced amax of the transposed weight, see :meth:`OperandProvider.weight`.
    """
    if quantized_weight is not None:
        check_held(quantized_weight, weight, plan.recipe, plan.needs_grad_input)
        return pair_of(quantized_weight[0]), pair_of(quantized_weight[1]), None
    spec_t = plan.recipe.grad_input.rhs if plan.needs_grad_input else None
    pair, amax_t = plan.provider.weight(weight, plan.recipe.output.rhs, spec_t)
    return pair, NO_PAIR, amax_t


def apply_linear(
    rows: Tensor,
    pairs: tuple[Pair, Pair],
    weight: Tensor,
    bias: Tensor | None,
    plan: LinearPlan,
    quantized_weight: Operands | None,
) -> Tensor:
    """:func:`linear` of ``rows [M, K]`` that are quantized as ``pairs`` already.

    ``rows`` carries the dtype and the gradient; it is read only where the recipe keeps a GEMM in high precision.
    """
    weight_pair, cached, amax_t = weight_pairs(weight, plan, quantized_weight)
    out: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        rows, weight, bias, plan, amax_t, *pairs[0], *pairs[1], *weight_pair, *cached
    )
    return out
