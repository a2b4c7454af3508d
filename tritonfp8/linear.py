"""A linear layer whose three GEMMs follow a recipe: what is quantized when, what is saved, how gradients flow.

Public as :mod:`tritonfp8.functional`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonfp8 import linear_op, ops, recompute, traced_op
from tritonfp8.handlers import PLAIN, handler_of
from tritonfp8.linear_checks import autocast_all, autocast_dtype, check_dtypes, check_linear, check_shapes
from tritonfp8.operands import NO_PAIR, WHOLE, Amaxes, Operands, Pair, Quantizer, quantize_for
from tritonfp8.quantized import Quantized
from tritonfp8.recipes import Gemm, Recipe, get, recipe_of
from tritonfp8.second_derivative import first_order
from tritonfp8.shared_input import SharedInput, forget
from tritonfp8.specs import QuantSpec, check_floating, require_flag, require_type, shown


class QuantizedWeight:
    """Base, besides Tensor, of weights ``[N, K]`` that come quantized: the layer takes their operands as they are."""

    @staticmethod
    def operand(
        weight: QuantizedWeight, recipe: Recipe, transposed: bool, grad_output: Tensor | None = None
    ) -> Quantized:
        """The weight as ``output`` reads it, or transposed as ``grad_input`` does.

        Backward passes its grad_output: what depends on that, a compiler does not move into forward.

        Raises:
            ValueError: it was quantized for another recipe.
        """
        raise NotImplementedError


def _quantized(pairs: tuple[Pair, Pair], specs: Sequence[QuantSpec | None]) -> Operands:
    first, second = (
        None if spec is None or pair[0] is None or pair[1] is None else Quantized(pair[0], pair[1], spec)
        for pair, spec in zip(pairs, specs, strict=True)
    )
    return first, second


def pair_of(q: Quantized | None) -> Pair:
    """``(qdata, scale)``, each None where there is none."""
    return NO_PAIR if q is None else (q.qdata, q.scale)


def _operand(weight: QuantizedWeight, recipe: Recipe, transposed: bool, grad_output: Tensor | None = None) -> Pair:
    # Static, and of the class: a graph takes the methods of an object that is a tensor for torch's.
    return pair_of(type(weight).operand(weight, recipe, transposed, grad_output))


def _serves_both(recipe: Recipe) -> bool:
    """Whether ``grad_input`` reads exactly the transpose of what ``output`` reads: square blocks of one spec."""
    spec = recipe.output.rhs
    return spec is not None and spec == recipe.grad_input.rhs and spec.block[0] == spec.block[1]


def quantize_weight(weight: Tensor, recipe: str | Recipe, needs_grad_input: bool = True) -> Operands:
    """``weight [N, K]`` as the GEMMs of ``recipe`` read it, for :func:`linear` to use more than once.

    Returns:
        The weight for ``output``, and its transpose for ``grad_input``. The second is None where that GEMM is not
        needed, keeps its operands in high precision, or can transpose the first exactly (square blocks): one copy of
        N K bytes then serves both.

    Raises:
        TypeError: ``weight`` is no floating tensor, or an argument is of another type.
        ValueError: ``weight`` has not two dims, or an unknown recipe.
    """
    check_floating("weight", weight)
    require_flag("needs_grad_input", needs_grad_input)
    if weight.ndim != 2:
        raise ValueError(f"weight must be [N, K]; got shape {tuple(weight.shape)}")
    recipe = get(recipe)
    transposed = None if _serves_both(recipe) or not needs_grad_input else recipe.grad_input.rhs
    specs = (recipe.output.rhs, transposed)
    return _quantized(quantize_for(weight.detach(), *specs), specs)


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


class Plan(NamedTuple):
    """What a linear layer computes besides its output, and by which recipe."""

    recipe: Recipe
    needs_grad_input: bool
    needs_grad_weight: bool
    weight_is_held: bool
    """Somebody keeps the quantized weight: grad_input reads that, and not the weight."""
    quantizer: Quantizer
    casts_input_again: bool = False
    """grad_weight's operand is cast in backward, from the input, which a compiler may compute anew or have anyway."""
    no_op_has_gradient: bool = False
    """There is no op that carries this layer's gradients into a graph; see :func:`tritonfp8.traced_op.sealed`."""


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
        plan: Plan,
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
        return traced_op.sealed(out, input, weight, bias) if plan.no_op_has_gradient else out

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


def gradients(plan: Plan, grad_output: Tensor, saved: Saved) -> tuple[Tensor | None, Tensor | None]:
    """``(grad_input, grad_weight)`` of ``grad_output [M, N]``, each None where the plan needs none."""
    recipe, input = plan.recipe, saved.input
    grad_input = grad_weight = None
    pair, pair_t = plan.quantizer.quantize(
        "grad_output",
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
                input_pair = plan.quantizer.quantize("input", anew, None, recipe.grad_weight.rhs)[1]
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


def weight_t(plan: Plan, grad_output: Tensor, weight: Tensor | None, held: Pair, amax_t: Tensor | None = None) -> Pair:
    """The transposed weight for grad_input: the held one, the transpose of the held one, or quantized now."""
    qdata, scale = held
    if qdata is not None and scale is not None:
        return (qdata.t().contiguous(), scale.t().contiguous()) if _serves_both(plan.recipe) else held
    assert weight is not None
    if isinstance(weight, QuantizedWeight):
        return _operand(weight, plan.recipe, True, grad_output)
    return plan.quantizer.quantize("weight", weight, None, plan.recipe.grad_input.rhs, (None, amax_t))[1]


def held_for_backward(plan: Plan, weight_pair: Pair, held: Pair) -> Pair:
    """What to save of a weight that somebody holds, for :func:`weight_t`; nothing of any other."""
    if not plan.weight_is_held:
        return NO_PAIR
    return weight_pair if _serves_both(plan.recipe) else held


def _check_held(held: Operands, weight: Tensor, recipe: Recipe, needs_grad_input: bool) -> None:
    """Raise unless ``held`` is what :func:`quantize_weight` gives for this weight's shape and this recipe."""
    if not isinstance(held, tuple | list) or [q for q in held if not isinstance(q, Quantized | None)] or len(held) != 2:
        raise TypeError(
            f"quantized_weight must be what tritonfp8.functional.quantize_weight returns, or None; got {shown(held)}"
        )
    wanted = (recipe.output.rhs, None if _serves_both(recipe) or not needs_grad_input else recipe.grad_input.rhs)
    shapes = (tuple(weight.shape), tuple(weight.shape[::-1]))
    for name, q, spec, shape in zip(("weight", "weight.T"), held, wanted, shapes, strict=True):
        if spec is None:
            continue
        came = "None" if q is None else f"{q.spec} of shape {tuple(q.shape)}"
        if q is None or q.spec != spec or tuple(q.shape) != shape:
            raise ValueError(
                f"quantized_weight must hold {name} as recipe {recipe.name!r} reads it, {spec} of shape {shape}; got "
                f"{came}. Use tritonfp8.functional.quantize_weight."
            )


def _weight_amaxes(weight: Tensor, plan: Plan, quantized_weight: Operands | None) -> Amaxes:
    """What other ranks say about a weight that is quantized now, for both GEMMs that read it."""
    if quantized_weight is not None or isinstance(weight, QuantizedWeight):
        return None, None
    transposed = plan.recipe.grad_input.rhs if plan.needs_grad_input else None
    return plan.quantizer.amaxes("weight", weight.detach(), plan.recipe.output.rhs, transposed)


def weight_pairs(
    weight: Tensor, plan: Plan, quantized_weight: Operands | None, amaxes: Amaxes | None = None
) -> tuple[Pair, Pair]:
    """What the GEMMs read of a weight, in its order and held for grad_input: given, gathered, or quantized now."""
    if quantized_weight is not None:
        _check_held(quantized_weight, weight, plan.recipe, plan.needs_grad_input)
        return pair_of(quantized_weight[0]), pair_of(quantized_weight[1])
    if isinstance(weight, QuantizedWeight):
        return _operand(weight, plan.recipe, False), NO_PAIR
    return plan.quantizer.quantize("weight", weight.detach(), plan.recipe.output.rhs, None, amaxes)


def apply_linear(
    rows: Tensor,
    pairs: tuple[Pair, Pair],
    weight: Tensor,
    bias: Tensor | None,
    plan: Plan,
    quantized_weight: Operands | None,
) -> Tensor:
    """:func:`linear` of ``rows [M, K]`` that are quantized as ``pairs`` already.

    ``rows`` carries the dtype and the gradient; it is read only where the recipe keeps a GEMM in high precision.
    """
    amaxes = _weight_amaxes(weight, plan, quantized_weight)
    weights = weight_pairs(weight, plan, quantized_weight, amaxes)
    out: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        rows, weight, bias, plan, amaxes[1], *pairs[0], *pairs[1], *weights[0], *weights[1]
    )
    return out


def _may_cast_again(weight: Tensor, shares_input: bool) -> bool:
    """Whether grad_weight's operand is worth a second pass over the input in backward, if that need not be saved.

    A compiled layer mostly has what makes its inputs at hand in backward: the residual stream before a norm, the result
    of attention. Casting there is a byte less to save for each element, for two more to move. A wide input of a single
    layer, such as the activation of an MLP, has to be written anew before it is cast: twice the price.
    """
    return shares_input or weight.shape[1] <= weight.shape[0]


def _is_made_in_graph(x: Tensor) -> bool:
    """Whether the graph that is traced makes ``x``, rather than being given it."""
    if torch.compiler.is_dynamo_compiling():
        return not x.is_leaf
    # What a graph is given has no history, or one that says that it must not be used.
    return x.grad_fn is not None and x.grad_fn.name() != "torch::autograd::Error"


def local_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    *,
    quantized_weight: Operands | None = None,
    shared_input: SharedInput | None = None,
    quantizer: Quantizer = WHOLE,
    may_cast_again: bool = False,
) -> Tensor:
    """:func:`linear` on the operands as they lie here, quantized by ``quantizer``; handlers call it on shards.

    ``may_cast_again``: in a graph, whose compiler chooses what is saved; see :func:`_may_cast_again`.
    """
    cast_input, cast_weight, cast_bias = autocast_all(input.device.type, input, weight, bias)
    assert cast_input is not None
    assert cast_weight is not None
    check_linear(cast_input, cast_weight, cast_bias)
    return computed_linear(
        cast_input,
        cast_weight,
        cast_bias,
        recipe,
        came_as=input,
        quantized_weight=quantized_weight,
        shared_input=shared_input,
        quantizer=quantizer,
        may_cast_again=may_cast_again,
    )


def computed_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    *,
    came_as: Tensor | None = None,
    quantized_weight: Operands | None = None,
    shared_input: SharedInput | None = None,
    quantizer: Quantizer = WHOLE,
    may_cast_again: bool = False,
) -> Tensor:
    """:func:`local_linear` of operands that are checked, in the dtype to compute in.

    ``came_as`` is the input as the layer was called with it, before autocast: siblings share under that.
    """
    came_as = input if came_as is None else came_as
    rows = torch.atleast_2d(input).flatten(0, -2) if input.ndim != 2 else input
    grad = torch.is_grad_enabled()
    needs = (grad and input.requires_grad, grad and weight.requires_grad)
    again = may_cast_again and needs[1] and recipe.grad_weight.rhs is not None and _is_made_in_graph(came_as)
    sharded = quantizer is not WHOLE or isinstance(weight, QuantizedWeight)
    plan = Plan(recipe, *needs, quantized_weight is not None, quantizer, again, no_op_has_gradient=sharded)
    specs = (recipe.output.lhs, recipe.grad_weight.rhs if plan.needs_grad_weight and not again else None)
    data = rows.detach()
    if shared_input is None:
        if not torch.compiler.is_compiling():
            forget()
        pairs = quantizer.quantize("input", data, *specs)
    else:
        require_type("shared_input", shared_input, SharedInput, "a tritonfp8.functional.SharedInput or None")
        pairs = shared_input.quantize(came_as, data, specs, quantizer)
    out = apply_linear(rows, pairs, weight, bias, plan, quantized_weight)
    return out if input.ndim == 2 else out.reshape(*input.shape[:-1], weight.shape[0])


@linear_op.implementation
def _linear_of_op(
    input: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, shares_input: bool, *key: object
) -> Tensor:
    again = _may_cast_again(weight, shares_input)
    return local_linear(input, weight, bias, recipe_of(recipe), may_cast_again=again)


def _linear_in_graph(
    input: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, shared_input: SharedInput | None
) -> Tensor:
    """:func:`linear` of plain tensors while Dynamo traces."""
    # What is raised inside the op comes to the caller as a RuntimeError of the compiler's.
    check_shapes(input, weight, bias)
    dtype = autocast_dtype(input.device.type)
    if dtype is None:
        check_dtypes(input, weight, bias)
    shares_input = shared_input is not None
    return linear_op.call(input, weight, bias, *recipe.args, shares_input, dtype or input.dtype, linear_op.CODE)


def _linear_in_trace(
    input: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, quantized_weight: Operands | None
) -> Tensor:
    """:func:`linear` as one op with its gradient, for the graph that is being traced."""
    x, w, b = autocast_all(input.device.type, input, weight, bias)
    assert x is not None
    assert w is not None
    check_linear(x, w, b)
    held: Operands = (None, None)
    if quantized_weight is not None:
        needs_grad_input = torch.is_grad_enabled() and x.requires_grad
        _check_held(quantized_weight, w, recipe, needs_grad_input)
        held = quantized_weight
    return traced_op.call(x, w, *recipe.args, b, *pair_of(held[0]), *pair_of(held[1]))


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: str | Recipe = "rowwise",
    *,
    quantized_weight: Operands | None = None,
    shared_input: SharedInput | None = None,
) -> Tensor:
    """``input @ weight.T + bias``, its three GEMMs by ``recipe``; differentiable once, composes with ``torch.compile``.

    Args:
        input: ``[..., K]``; any leading dims, empty ones too.
        weight: ``[N, K]``, in the dtype of ``input`` (or any where autocast is on, which casts as ``F.linear`` does).
        bias: ``[N]`` or None.
        recipe: a name or a :class:`~tritonfp8.Recipe`.
        quantized_weight: what :func:`quantize_weight` made of ``weight`` (of its cast, where autocast is on), in place
            of quantizing it in this call and again in its backward. It is used as it is: that the weight has not
            changed since is up to its owner. ``weight`` still gets the gradient.
        shared_input: where layers that read the same ``input`` find it quantized.

    Returns:
        ``[..., N]`` in the dtype of ``input`` (autocast's where it is on).

    Saved for backward, a layer: ``input.T`` quantized, M K bytes and scales (rowwise 4 K bytes, blockwise M K / 32,
    mxfp8 M K / 32), or the input itself, 2 M K bytes in bf16, where the recipe computes grad_weight in high precision.
    Nothing of the input is saved if the weight needs no grad. In a compiled graph an input that the graph makes is cast
    for grad_weight in backward, where the compiler has it or computes it anew, and then nothing is saved of it either;
    not that of a single layer (no ``shared_input``) with K > N. The weight is kept for grad_input as it is; where
    autocast casts it, that is a copy of 2 N K bytes, as in ``F.linear``.

    Raises:
        TypeError: a dtype other than bfloat16, float16 or float32, or dtypes that differ.
        ValueError: shapes that do not go together, an unknown recipe, or a ``quantized_weight`` of another recipe.
        RuntimeError: when a gradient of the gradient is asked for.
    """
    recipe = get(recipe)
    compiling = torch.compiler.is_dynamo_compiling()
    if not compiling:
        recipe = recompute.decided(weight, recipe)
    traced = torch.compiler.is_exporting() if compiling else traced_op.is_traced()
    in_graph = compiling and not traced and quantized_weight is None
    if in_graph and type(input) in PLAIN and type(weight) in PLAIN and type(bias) in PLAIN:
        return _linear_in_graph(input, weight, bias, recipe, shared_input)
    handler = handler_of(input, weight, bias)
    if handler is not None:
        if quantized_weight is not None:
            raise ValueError(
                "quantized_weight goes with plain tensors; got an operand of another type, such as DTensor"
            )
        return handler(input, weight, bias, recipe, shared_input)
    if traced and not isinstance(weight, QuantizedWeight):
        return _linear_in_trace(input, weight, bias, recipe, quantized_weight)
    again = compiling and _may_cast_again(weight, shared_input is not None)
    return local_linear(
        input, weight, bias, recipe, quantized_weight=quantized_weight, shared_input=shared_input, may_cast_again=again
    )
