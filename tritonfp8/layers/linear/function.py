"""The autograd function of a linear layer: which operands its three GEMMs read, what it saves, how gradients flow."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.compat import counting
from tritonfp8.layers.first_order import first_order
from tritonfp8.layers.linear.operands import LOCAL, NO_PAIR, Later, OperandProvider, Pair, Specs
from tritonfp8.layers.linear.weight_source import CASTS, WeightSource, serves_both
from tritonfp8.ops import sealed
from tritonfp8.recipes import Gemm, Recipe, recipe_of
from tritonfp8.specs import MXFP4


def multiply(
    gemm: Gemm, lhs: Pair, rhs: Pair, bias: Tensor | None, out_dtype: torch.dtype, residual: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``lhs @ rhs.T + bias + residual`` on operands that are quantized as ``gemm`` says.

    ``rhs`` may have codes of MXFP4, two a byte: the GEMM expands them to what ``gemm`` says, by ``row_scale``.
    """
    assert gemm.lhs is not None
    assert gemm.rhs is not None
    if row_scale is not None:
        return ops.packed_matmul(
            lhs[0], lhs[1], *gemm.lhs.args, rhs[0], rhs[1], *MXFP4.args,
            bias, None, residual, out_dtype, gemm.accumulation, gemm.batch_invariant, row_scale,
        )  # fmt: skip
    return ops.scaled_matmul(
        lhs[0], lhs[1], *gemm.lhs.args, rhs[0], rhs[1], *gemm.rhs.args,
        bias, None, residual, out_dtype, gemm.accumulation,
        # A default is left out: the dispatcher takes time for each argument.
        *((True,) if gemm.batch_invariant else ()),
    )  # fmt: skip


class LinearPlan(NamedTuple):
    """The gradients that a linear layer computes, and how it gets its operands.

    Attributes:
        recipe: of its three GEMMs.
        needs_grad_input, needs_grad_weight: whether somebody needs these gradients.
        weight_is_cached: whether the caller keeps the quantized weight; ``grad_input`` then reads that.
        provider: where the operands of the input and of the gradient come from.
        source: where the operands of the weight come from.
        casts_input_again: whether backward casts the operand of ``grad_weight`` from the input. Only in a graph: its
            compiler has the input in backward, or recomputes it.
        layer: the module whose call this is, inside :func:`~tritonfp8.compat.counting.log_gemms`; else None. Backward
            and a recompute of the forward have plans of the same call, so their GEMMs are logged under the right layer.
        chained: the text of the recipe if the ops of forward are one call, and the ops of backward another; see
            :func:`may_chain`.
    """

    recipe: Recipe
    needs_grad_input: bool
    needs_grad_weight: bool
    weight_is_cached: bool
    provider: OperandProvider
    source: WeightSource
    casts_input_again: bool = False
    layer: Any = None
    chained: str | None = None


def weight_specs(recipe: Recipe, needs_grad_input: bool) -> Specs:
    """How a layer quantizes its weight, for ``output`` and ``grad_input``."""
    return Specs(recipe.output.rhs, recipe.grad_input.rhs if needs_grad_input else None, recipe.codes["weight"])


class LinearFunction(torch.autograd.Function):
    """``input [M, K] @ weight [N, K].T + bias`` by a recipe, on operands that are quantized already.

    It runs only the GEMMs whose result somebody needs, and saves only what they read. For ``grad_weight`` that is
    ``input.T`` quantized: M K bytes and scales, where bf16 takes 2 M K bytes. A recipe that keeps this GEMM in high
    precision needs the input itself. For ``grad_input`` it is the weight, which is alive anyway (under
    autocast its cast), and the reduced amaxes of ``weight.T``.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: LinearPlan,
        weight_amax_t: Tensor | None,
        *quantized: Tensor | None,
    ) -> Tensor:
        input_pair, kept = (quantized[0], quantized[1]), (quantized[2], quantized[3])
        weight_pair, cached = (quantized[4], quantized[5]), (quantized[6], quantized[7])
        recipe = plan.recipe
        if plan.layer is not None:
            counting.announce(plan.layer, "output")
        if plan.chained is not None:
            tensors = (input if input_pair[0] is None else None, weight, bias, *input_pair)
            needs, given = plan[1:3], tuple([x is not None for x in tensors])
            chain = _output_chain(plan.chained, needs, input.dtype, given)
            assert chain is not None
            out, *made, weight_amax_t = _run(chain, tensors)
            kept = kept if made[0] is None else (made[0], made[1])
        elif recipe.output.rhs is not None:
            is_packed = weight_pair[0].dtype == torch.uint8  # type: ignore[union-attr]
            row_scale, weight_amax_t = (weight_amax_t, None) if is_packed else (None, weight_amax_t)
            out = multiply(recipe.output, input_pair, weight_pair, bias, input.dtype, row_scale=row_scale)
        else:
            out = ops.matmul(input, weight, bias)
        if plan.provider is not LOCAL:
            out = plan.provider.output(out)
        if plan.weight_is_cached or (recipe.codes["weight"] is not None and _reads_codes_of_shard(plan)):
            cached = cached_for_backward(plan, weight_pair, cached)
        keep_weight = plan.needs_grad_input and cached[0] is None
        keep_input = plan.needs_grad_weight and kept[0] is None
        codes, of_weight = recipe.codes["input"], recipe.codes["weight"]
        if keep_input and codes is not None and recipe.grad_weight.rhs is None:
            # In high precision backward reads the values of the codes.
            keep_input, kept = False, input_pair
        weight_scale = weight_pair[1] if keep_weight and of_weight is not None and _casts_weight_again(plan) else None
        input_scale = input_pair[1] if keep_input and codes is not None else None
        ctx.save_for_backward(
            weight if keep_weight else None, weight_scale, weight_amax_t, input if keep_input else None, input_scale,
            *kept, *cached,
        )  # fmt: skip
        ctx.plan = plan
        ctx.needs_grad_bias = bias is not None and bias.requires_grad
        ctx.dtypes = (input.dtype, weight.dtype)
        # No op carries the gradients of other operands into a traced graph.
        return out if plan.provider is LOCAL and plan.source is CASTS else sealed(out, input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102
        return (*first_order(LinearFunction._grads, ctx, grad_output), *[None] * 10)

    @staticmethod
    def _grads(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        weight, weight_scale, weight_amax_t, input, first_scale, qdata, scale, *cached = ctx.saved_tensors
        saved = Saved(
            weight, weight_amax_t, input, (qdata, scale), (cached[0], cached[1]), ctx.dtypes, weight_scale, first_scale
        )
        if ctx.plan.chained is not None:
            tensors = (grad_output, weight, weight_amax_t, qdata, scale)
            given = tuple([x is not None for x in tensors])
            chain = _gradient_chain(ctx.plan.chained, ctx.plan[1:3], ctx.dtypes, ctx.needs_grad_bias, given)
            if chain is not None:
                return tuple(_run(chain, tensors))
        return gradients(ctx.plan, grad_output, saved, ctx.needs_grad_bias)


class Saved(NamedTuple):
    """Tensors that backward reads. A field is None where no GEMM of the plan reads it.

    Attributes:
        weight: ``[N, K]``.
        weight_amax_t: the amaxes of ``weight.T``; see :meth:`WeightSource.now`.
        input: ``[M, K]``.
        input_pair: ``input.T`` quantized for ``grad_weight``. Of an input that backward casts again: None, and the
            amaxes of ``input.T``; see :meth:`OperandProvider.input_now`.
        cached: of a weight that the caller keeps quantized; see :func:`cached_for_backward`.
        dtypes: of the input and the weight, and so of their gradients.
        weight_scale, input_scale: of the codes of the weight and of an input that backward casts again, if their
            transposes are made from codes.
    """

    weight: Tensor | None
    weight_amax_t: Tensor | None
    input: Tensor | None
    input_pair: Pair
    cached: Pair
    dtypes: tuple[torch.dtype, torch.dtype]
    weight_scale: Tensor | None = None
    input_scale: Tensor | None = None


def gradients(
    plan: LinearPlan, grad_output: Tensor, saved: Saved, needs_grad_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``(grad_input, grad_weight, grad_bias)`` of ``grad_output [M, N]``, each None where nobody needs it."""
    recipe = plan.recipe
    grad_input = grad_weight = grad_bias = None
    spec = recipe.grad_input.lhs if plan.needs_grad_input else None
    spec_t = recipe.grad_weight.lhs if plan.needs_grad_weight else None
    specs = Specs(spec, spec_t, recipe.codes["grad_output"])
    if needs_grad_bias:
        pair, pair_t, grad_bias = plan.provider.grad_output_and_sum(grad_output, specs)
    else:
        pair, pair_t = plan.provider.grad_output(grad_output, specs)
    # Codes that forward saved are free before grad_input, which is as large as the input, is allocated.
    weight_first = saved.input_pair[0] is not None
    if plan.needs_grad_weight and weight_first:
        grad_weight = _grad_weight(plan, grad_output, pair_t, saved)
    if plan.needs_grad_input:
        grad_input = _grad_input(plan, grad_output, pair, saved)
    if plan.needs_grad_weight and not weight_first:
        grad_weight = _grad_weight(plan, grad_output, pair_t, saved)
    return grad_input, grad_weight, grad_bias


def _grad_input(plan: LinearPlan, grad_output: Tensor, pair: Pair, saved: Saved) -> Tensor:
    recipe = plan.recipe
    if plan.layer is not None:
        counting.announce(plan.layer, "grad_input")
    if recipe.grad_input.rhs is not None:
        weight_pair = weight_t(plan, grad_output, saved)
        return multiply(recipe.grad_input, pair, weight_pair, None, saved.dtypes[0])
    return ops.matmul(grad_output, _weight_values(plan, saved).t())


def _weight_values(plan: LinearPlan, saved: Saved) -> Tensor:
    """The weight for a GEMM in high precision; with codes the values that forward multiplied, in the input's dtype."""
    spec, (qdata, scale), dtype = plan.recipe.codes["weight"], saved.cached, saved.dtypes[0]
    if spec is None or plan.source.has_codes:
        # A weight that has codes has their values only.
        assert saved.weight is not None
        return plan.source.values(saved.weight)
    if qdata is None or scale is None:
        assert saved.weight is not None
        qdata, scale = ops.quantize(plan.source.values(saved.weight), *spec.args)
    return ops.dequantize(qdata, scale, *spec.args, dtype)


def _grad_weight(plan: LinearPlan, grad_output: Tensor, pair_t: Pair, saved: Saved) -> Tensor:
    recipe, input = plan.recipe, saved.input
    if plan.layer is not None:
        counting.announce(plan.layer, "grad_weight")
    if recipe.grad_weight.rhs is not None:
        input_pair = saved.input_pair
        if plan.casts_input_again:
            assert input is not None
            how = Later(recipe.grad_weight.rhs, input_pair[1], recipe.codes["input"], saved.input_scale)
            input_pair = plan.provider.input_later(recomputable(input), how)
        return multiply(recipe.grad_weight, pair_t, input_pair, None, saved.dtypes[1])
    (qdata, scale), spec = saved.input_pair, recipe.codes["input"]
    if spec is not None and qdata is not None and scale is not None:
        input = ops.dequantize(qdata, scale, *spec.args, saved.dtypes[0])
    assert input is not None
    return ops.matmul(grad_output.t(), input.t())


def recomputable(x: Tensor) -> Tensor:
    """``x`` to the bit, in a form that a compiler recomputes in backward instead of saving it.

    The partitioner of ``torch.compile`` must save what an opaque op reads in backward: if the cast read ``x`` itself,
    it would save ``x`` or its cast. A pointwise chain it recomputes, fused with what computes ``x``.
    """
    return x.neg().neg()


def weight_t(plan: LinearPlan, grad_output: Tensor, saved: Saved) -> Pair:
    """The transposed weight for ``grad_input``: from the cached operands if there are any, else from the source."""
    qdata, scale = saved.cached
    if qdata is not None and scale is not None:
        return (qdata.t().contiguous(), scale.t().contiguous()) if serves_both(plan.recipe) else saved.cached
    spec_t = plan.recipe.grad_input.rhs
    assert saved.weight is not None
    assert spec_t is not None
    how = Later(spec_t, saved.weight_amax_t, plan.recipe.codes["weight"], saved.weight_scale)
    return plan.source.later(saved.weight, how, grad_output)


def _casts_weight_again(plan: LinearPlan) -> bool:
    """Whether backward makes the codes of the weight again; a weight that has codes keeps their scales itself."""
    return plan.recipe.grad_input.rhs is not None and not plan.source.has_codes


def _reads_codes_of_shard(plan: LinearPlan) -> bool:
    """Whether backward dequantizes a shard: its codes are kept, as their amaxes take a collective of forward."""
    return (
        plan.recipe.grad_input.rhs is None
        and plan.needs_grad_input
        and plan.source is not CASTS
        and not plan.source.has_codes
    )


def cached_for_backward(plan: LinearPlan, weight_pair: Pair, cached: Pair) -> Pair:
    """The pair to save for :func:`weight_t` of a weight that the caller keeps quantized; else no pair."""
    recipe = plan.recipe
    # In high precision backward reads the values of the codes.
    reads_first = serves_both(recipe) or (recipe.codes["weight"] is not None and recipe.grad_input.rhs is None)
    return weight_pair if reads_first else cached


@functools.cache
def may_chain(recipe: str) -> bool:
    """Whether a layer of a recipe runs the ops of forward as one call, and the ops of backward as another.

    To the same bits: the host then looks up one plan for all launches, where each op of eager code takes it as long as
    two launches. All three GEMMs must be quantized, transposes made from values, and weights not rounded before.
    """
    found = recipe_of(recipe)
    if found.transposed_from != "values" or found.quantized_share < 1 or found.weights is not None:
        return False
    needs, dtype = (True, True), torch.bfloat16
    forward = _output_chain(recipe, needs, dtype, (True, True, True, False, False))
    return forward is not None and _gradient_chain(recipe, needs, (dtype, dtype), True, (True,) * 5) is not None


def _run(chain: tuple[str, tuple[bool, ...]], tensors: Sequence[Tensor | None]) -> list[Any]:
    text, present = chain
    first, *others = [x for x in tensors if x is not None]
    results = iter(ops.CALLS.chain(first, others, text))
    return [next(results) if each else None for each in present]


@functools.cache
def _output_chain(
    recipe: str, needs: tuple[bool, bool], dtype: torch.dtype, given: tuple[bool, ...]
) -> tuple[str, tuple[bool, ...]] | None:
    """The chain of ``(output, input_t, its scale, the amaxes of weight_t)``; None for a batch-invariant output.

    It gets input, weight and bias; or weight, bias, and the codes and scale of an input that siblings share.
    """

    def run(input: Any, weight: Any, bias: Any, qdata: Any, scale: Any) -> Sequence[Tensor | None]:
        of = recipe_of(recipe)
        specs = Specs(of.output.lhs, of.grad_weight.rhs if needs[1] else None)
        pair, kept = ((qdata, scale), NO_PAIR) if input is None else LOCAL.input(input, specs)
        weight_pair, amax_t = CASTS.now(weight, weight_specs(of, needs[0]))
        return multiply(of.output, pair, weight_pair, bias, dtype), *kept, amax_t

    return ops.chain_of(run, given)


@functools.cache
def _gradient_chain(
    recipe: str, needs: tuple[bool, bool], dtypes: tuple[torch.dtype, torch.dtype], bias: bool, given: tuple[bool, ...]
) -> tuple[str, tuple[bool, ...]] | None:
    """The chain of :func:`gradients`; None if it calls more than ops."""
    if not any(needs) or (bias and not all(needs)):
        # torch sums a bias.
        return None
    plan = LinearPlan(recipe_of(recipe), *needs, False, LOCAL, CASTS)

    def run(grad_output: Any, weight: Any, amax_t: Any, qdata: Any, scale: Any) -> Sequence[Tensor | None]:
        return gradients(plan, grad_output, Saved(weight, amax_t, None, (qdata, scale), NO_PAIR, dtypes), bias)

    return ops.chain_of(run, given)
