"""``grouped_linear()``: the linear layers of all experts in one call, their three grouped GEMMs by a recipe.

    output[g]      = input[g] @ weight[g].T          groups along the rows
    grad_input[g]  = grad_output[g] @ weight[g]      groups along the rows
    grad_weight[g] = grad_output[g].T @ input[g]     groups along the contraction

for the rows of each group g. Every group is quantized separately, so a group has the codes that
:func:`tritonfp8.functional.linear` makes of its tokens; and, multiplied by the reference, the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.compat import counting
from tritonfp8.compat.torch_private import is_transformed
from tritonfp8.layers.extensions import SOURCES
from tritonfp8.layers.first_order import first_order
from tritonfp8.layers.linear import (
    CASTS,
    NO_PAIR,
    Later,
    Pair,
    Specs,
    WeightSource,
    autocast_dtype,
    cast_to,
    source_for,
)
from tritonfp8.layers.moe.checks import (
    are_plain,
    check_cached,
    check_grouped_linear,
    check_offsets,
    check_recipe,
    check_tensors,
    fit_groups,
)
from tritonfp8.layers.recompute import decided
from tritonfp8.layers.unsupported import refuse_transform
from tritonfp8.recipes import Gemm, Recipe, get
from tritonfp8.specs import MXFP4, QuantSpec
from tritonfp8.specs.quantized import QuantizedGroups


class Rows(NamedTuple):
    """The rows of all groups.

    Attributes:
        x: the rows themselves, without any of the following.
        picked: ``[R]``: which rows of ``x`` they are.
        factors: ``[R]``: a factor of each picked row.
        swiglu: they are SwiGLU of ``x``.
        amax: of ``x``, if it is known; see ``reference.swiglu_backward_amax``.
    """

    x: Tensor
    picked: Tensor | None = None
    factors: Tensor | None = None
    swiglu: bool = False
    amax: Tensor | None = None

    @property
    def number(self) -> int:
        """How many there are."""
        return (self.x if self.picked is None else self.picked).shape[0]

    def tensor(self) -> Tensor:
        """The rows in memory of their own, rounded as the casts round them; ``x`` itself if nothing else is given."""
        if self.swiglu:
            return ops.swiglu(self.x)
        if self.picked is None:
            return self.x
        rows = self.x[self.picked]
        return rows if self.factors is None else (rows.float() * self.factors.float()[:, None]).to(rows.dtype)


def tokens_of(rows: Rows, offsets: Tensor, specs: Specs) -> tuple[Pair, Pair]:
    """``(qdata, scale)`` of each group of rows and of its transpose, each None where its spec is."""
    spec, spec_t, codes = specs
    x, *sources, amax = rows
    first = codes if codes is not None and spec_t is not None else spec
    if first is not None and spec_t is not None:
        known = (amax,) if codes is None else (None, True)
        qdata, scale, qdata_t, scale_t = ops.quantize_groups_both(
            x, offsets, *first.args, *spec_t.args, *sources, *known
        )
        return NO_PAIR if spec is None else (qdata, scale), (qdata_t, scale_t)
    return (
        NO_PAIR if spec is None else ops.quantize_groups(x, offsets, *spec.args, False, *sources),
        NO_PAIR if spec_t is None else ops.quantize_groups(x, offsets, *spec_t.args, True, *sources),
    )


def _multiply(
    gemm: Gemm,
    lhs: Pair,
    rhs: Pair,
    offsets: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    tokens: int = 0,
) -> Tensor:
    assert gemm.lhs is not None
    assert gemm.rhs is not None
    return ops.scaled_grouped_matmul(
        lhs[0], lhs[1], *gemm.lhs.args, rhs[0], rhs[1], *gemm.rhs.args, offsets, bias, out_dtype, gemm.accumulation,
        gemm.batch_invariant, tokens,
    )  # fmt: skip


def _dequantized(rows: Tensor, offsets: Tensor, spec: QuantSpec) -> Tensor:
    """Rows of groups as forward multiplied them, in their own dtype."""
    qdata, scale = ops.quantize_groups(rows, offsets, *spec.args)
    if spec.block[0] == -1:
        # The scale of a row is the scale of its group; rows of no group are zeros.
        place = torch.arange(len(rows), dtype=offsets.dtype, device=rows.device)
        scale = scale[torch.searchsorted(offsets, place, right=True).clamp(max=len(offsets) - 1)]
        return (qdata.float() * scale).to(rows.dtype)
    return ops.dequantize(qdata, scale, *spec.args, rows.dtype)


GroupedOperands = tuple[QuantizedGroups | None, QuantizedGroups | None]
"""Weights as two grouped GEMMs read them: quantized untransposed and transposed; None where no GEMM reads them."""


def quantize_weights(weight: Tensor, recipe: Recipe, needs_grad_input: bool = True) -> GroupedOperands:
    """``weight [E, N, K]`` as the GEMMs of ``recipe`` read it, for :func:`grouped_linear` to use more than once."""
    specs = (recipe.output.rhs, recipe.grad_input.rhs if needs_grad_input else None)
    pairs = source_for(recipe, weight, CASTS).both(weight, Specs(*specs, recipe.codes["weight"]))
    first, second = (
        None if spec is None else QuantizedGroups(*pair, spec, "matrices", weight.shape[0])  # type: ignore[arg-type]
        for spec, pair in zip(specs, pairs, strict=True)
    )
    return first, second


class GroupedPlan(NamedTuple):
    """What a call computes.

    Attributes:
        recipe: of its three GEMMs.
        needs_grad_input, needs_grad_weight, needs_grad_bias: whether somebody needs these gradients.
        is_cached: whether the caller keeps the quantized weights.
        layer: the module whose call this is, inside :func:`tritonfp8.compat.counting.log_gemms`; else None.
        source: gives the operands of the weight.
    """

    recipe: Recipe
    needs_grad_input: bool
    needs_grad_weight: bool
    needs_grad_bias: bool
    is_cached: bool = False
    layer: Any = None
    source: WeightSource = CASTS

    def output(
        self, rows: Rows, lhs: Pair, weight: Tensor, cached: Sequence[Any], offsets: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, list[Any]]:
        """The forward GEMM, of rows whose codes are ``lhs``.

        Returns:
            The rows; and what :meth:`grad_input` reads of the weight: the weight or None, the amaxes of its transposes
            or None, the scales of the codes that these are made from or None, the codes that the caller keeps.
        """
        if self.layer is not None:
            counting.announce(self.layer, "output")
        gemm, amax_t, codes = self.recipe.output, None, self.recipe.codes["weight"]
        rhs: Pair = NO_PAIR
        if gemm.rhs is None:
            out = ops.grouped_matmul(rows.tensor(), weight, offsets, bias)
        else:
            if self.is_cached:
                rhs = cached[0], cached[1]
            else:
                spec_t = self.recipe.grad_input.rhs if self.needs_grad_input else None
                rhs, amax_t = self.source.now(weight, Specs(gemm.rhs, spec_t, codes))
            if rhs[0] is not None and rhs[0].dtype == torch.uint8:
                assert gemm.lhs is not None
                out = ops.packed_grouped_matmul(
                    *lhs, *gemm.lhs.args, *rhs, *MXFP4.args, offsets, bias, rows.x.dtype, gemm.accumulation,
                    gemm.batch_invariant, amax_t,
                )  # fmt: skip
                # What a source of such codes gives are scales of expanded rows.
                amax_t = None
            else:
                out = _multiply(gemm, lhs, rhs, offsets, bias, rows.x.dtype)
        if not self.needs_grad_input:
            return out, [None, None, None]
        keeps = not self.is_cached or cached[2] is None
        # A weight that has codes keeps its scales itself.
        scale = rhs[1] if keeps and codes is not None and not self.source.has_codes else None
        return out, [weight if keeps else None, amax_t, scale, *cached[2:]]

    def grad_input(self, grad: Rows, lhs: Pair, kept: Sequence[Any], offsets: Tensor) -> Tensor:
        """The gradient of the rows; ``kept`` as :meth:`output` returned it."""
        if self.layer is not None:
            counting.announce(self.layer, "grad_input")
        gemm = self.recipe.grad_input
        weight, amax_t, scale, *cached = kept
        spec = self.recipe.codes["weight"]
        if gemm.rhs is None:
            assert weight is not None
            weight = self.source.values(weight)
            if spec is not None:
                weight = ops.dequantize(*ops.quantize_matrices(weight, *spec.args), *spec.args, grad.x.dtype)
            return ops.grouped_matmul(grad.tensor(), weight.transpose(1, 2), offsets)
        how = Later(gemm.rhs, amax_t, spec, scale)
        rhs = (cached[0], cached[1]) if cached else self.source.later(weight, how, grad.x)
        return _multiply(gemm, lhs, rhs, offsets, None, grad.x.dtype)

    def grad_weight(
        self, grad: Rows, lhs: Pair, rows: Rows | None, rhs: Pair, offsets: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """The gradient of the weight; the rows are None where their codes are ``rhs``."""
        if self.layer is not None:
            counting.announce(self.layer, "grad_weight")
        gemm = self.recipe.grad_weight
        if gemm.rhs is not None:
            return _multiply(gemm, lhs, rhs, offsets, None, dtype, grad.number)
        assert rows is not None
        values, spec = rows.tensor(), self.recipe.codes["input"]
        if spec is not None:
            values = _dequantized(values, offsets, spec)
        return ops.grouped_matmul(grad.tensor().t(), values.t(), offsets)

    def rows_of_swiglu(self, grad: Tensor, gate_up: Tensor, offsets: Tensor) -> Rows:
        """The gradient of ``gate_up`` from its SwiGLU's gradient, as this layer's gradient, whose casts come next.

        An op of its own: ``grad`` and ``gate_up`` are free before the codes are written.
        """
        lhs, lhs_t = self.recipe.grad_input.lhs, self.recipe.grad_weight.lhs
        both = self.needs_grad_input and self.needs_grad_weight
        from_codes = self.recipe.codes["grad_output"] is not None
        if not both or from_codes or lhs is None or lhs_t is None or -1 not in (*lhs.block, *lhs_t.block):
            return Rows(ops.swiglu_backward(grad, gate_up))
        rows, amax = ops.swiglu_backward_amax(grad, gate_up, offsets, *lhs.args, *lhs_t.args)
        return Rows(rows, amax=amax)

    def tokens_of_grad(self, grad: Rows, offsets: Tensor) -> tuple[Pair, Pair]:
        """The codes of the output's gradient for both gradients."""
        return tokens_of(
            grad,
            offsets,
            Specs(
                self.recipe.grad_input.lhs if self.needs_grad_input else None,
                self.recipe.grad_weight.lhs if self.needs_grad_weight else None,
                self.recipe.codes["grad_output"],
            ),
        )


class _GroupedLinear(torch.autograd.Function):
    """The autograd function of :func:`grouped_linear`; for all groups it saves what a linear layer saves."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor, plan: GroupedPlan, *cached: Any
    ) -> Tensor:
        kept_spec = plan.recipe.grad_weight.rhs if plan.needs_grad_weight else None
        rows = Rows(input)
        pair, kept = tokens_of(rows, offsets, Specs(plan.recipe.output.lhs, kept_spec, plan.recipe.codes["input"]))
        out, of_weight = plan.output(rows, pair, weight, cached, offsets, bias)
        keeps_input = plan.needs_grad_weight and kept[0] is None
        ctx.save_for_backward(offsets, input if keeps_input else None, *kept, *of_weight)
        ctx.plan, ctx.dtype = plan, weight.dtype
        return ops.sealed(out, input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grads = first_order(_GroupedLinear._grads, ctx, grad_output)
        return (*grads, *[None] * (6 if ctx.plan.is_cached else 2))

    @staticmethod
    def _grads(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        plan: GroupedPlan = ctx.plan
        offsets, input, kept_qdata, kept_scale, *of_weight = ctx.saved_tensors
        grad = Rows(grad_output)
        pair, pair_t = plan.tokens_of_grad(grad, offsets)
        grad_input = plan.grad_input(grad, pair, of_weight, offsets) if plan.needs_grad_input else None
        grad_weight = None
        if plan.needs_grad_weight:
            rows = None if input is None else Rows(input)
            grad_weight = plan.grad_weight(grad, pair_t, rows, (kept_qdata, kept_scale), offsets, ctx.dtype)
        return grad_input, grad_weight, ops.grouped_sum(grad_output, offsets) if plan.needs_grad_bias else None


def grouped_linear(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    recipe: str | Recipe = "rowwise",
    *,
    quantized_weight: GroupedOperands | None = None,
) -> Tensor:
    """``input @ weight[g].T + bias[g]`` for the rows of each group g, by ``recipe``; differentiable once.

    Args:
        input: ``[T, K]``, the rows of each group adjacent.
        weight: ``[E, N, K]``, a matrix for each group, in the dtype of ``input`` (or any where autocast is on). Any
            strides: ``weight.transpose(1, 2)`` of a parameter ``[E, K, N]`` will do.
        offsets: ``[E]``, int32, on the device of ``input``: the end of each group, like ``torch._grouped_mm``. Groups
            may be empty. Rows from ``offsets[-1]`` on belong to no group.
        bias: ``[E, N]`` or None.
        recipe: a name or a :class:`~tritonfp8.Recipe`.
        quantized_weight: both orientations of ``weight`` (of its cast, where autocast is on), quantized for ``recipe``
            by :func:`quantize_matrices`. The caller must make sure that ``weight``, which still gets the gradient, has
            not changed since.

    Returns:
        ``[T, N]`` in the dtype of ``input`` (autocast's where it is on); zero in rows of no group, whose gradient is
        zero, too.

    The scales of a group come from its own rows: its operands have the codes that :func:`tritonfp8.functional.linear`
    makes of this group, and, on a CPU, its outputs and gradients the bits. On a GPU kernels of their own multiply
    groups; they sum K in the same order for groups of every size. Saved for backward: the transposed input of each
    group in 8 bits, K (T + 128 E) bytes and scales at most, or the input itself if the recipe computes ``grad_weight``
    in high precision; the weight, and the amaxes that its cast found for backward (rowwise 4 E K bytes).

    Raises:
        TypeError: dtypes that differ or that no layer computes in, offsets of another dtype than int32, or a tensor
            subclass, such as a DTensor.
        ValueError: shapes or devices that do not fit, a recipe whose scales would belong to tokens of two groups; or
            offsets on a CPU that decrease or end beyond T. On a GPU the host would have to wait for the offsets, so bad
            ones raise nothing there: an end before the previous end counts as the previous end, one beyond T as T.
        RuntimeError: in a transform of ``torch.func``, or a second derivative.
    """
    x, w, b, plan, cached = checked(input, weight, offsets, bias, recipe, quantized_weight)
    return _GroupedLinear.apply(x, w, b, offsets, plan, *cached)  # type: ignore[no-untyped-call]


def checked(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    recipe: str | Recipe,
    quantized_weight: GroupedOperands | None,
    rows: int | None = None,
    needs_input: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, GroupedPlan, list[Any]]:
    """The operands of :func:`grouped_linear` after autocast, and what the call computes.

    ``rows``: how many are multiplied, if not all of ``input``. ``needs_input``: whether the rows need a gradient, if
    ``input`` does not say it.

    Raises:
        TypeError, ValueError, RuntimeError: see :func:`grouped_linear`.
    """
    recipe = recipe if isinstance(recipe, Recipe) else get(recipe)
    plain = are_plain(input, weight, offsets, bias)
    if not plain:
        check_tensors(bias, input=input, weight=weight, offsets=offsets)
    if not torch.compiler.is_dynamo_compiling():
        recipe = decided(weight, recipe)
        if is_transformed():
            refuse_transform("grouped_linear", "Call it outside of the transform")
    dtype = autocast_dtype(input.device.type)
    x, w, b = (input, weight, bias) if dtype is None else (cast_to(dtype, t) for t in (input, weight, bias))
    assert x is not None
    assert w is not None
    if not plain or not fit_groups(x, w, b, offsets):
        check_grouped_linear(x, w, b, offsets)
    check_offsets(offsets, w.shape[0], x.shape[0] if rows is None else rows)
    check_recipe(recipe)
    grad = torch.is_grad_enabled()
    needs_own, needs_weight, needs_bias = (grad and t is not None and t.requires_grad for t in (x, w, b))
    needs_input = needs_own if needs_input is None else grad and needs_input
    layer = counting.take_callers()[0] if counting.is_logging else None
    if quantized_weight is not None:
        check_cached(quantized_weight, w, recipe, needs_input)
    is_cached, source = quantized_weight is not None, SOURCES.get(type(w), CASTS)
    source = source if recipe.weights is None else source_for(recipe, w, source)
    plan = GroupedPlan(recipe, needs_input, needs_weight, needs_bias, is_cached, layer, source)
    cached = [] if quantized_weight is None else [*_pair(quantized_weight[0]), *_pair(quantized_weight[1])]
    return x, w, b, plan, cached


def _pair(q: QuantizedGroups | None) -> Pair:
    return NO_PAIR if q is None else (q.qdata, q.scale)
