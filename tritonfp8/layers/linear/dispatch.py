"""``linear()``: the entry of every linear layer. It picks one of the ways that :mod:`tritonfp8.layers.linear` lists.

Public as :mod:`tritonfp8.functional`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.compat import counting
from tritonfp8.compat.torch_private import dispatch_mode_count, is_functionalized, is_transformed
from tritonfp8.layers import recompute
from tritonfp8.layers.linear.checks import autocast_dtype, cast_to, check_dtypes, check_linear, check_shapes, fit
from tritonfp8.layers.linear.function import LinearFunction, LinearPlan, may_chain, weight_specs
from tritonfp8.layers.linear.input_cache import SharedInput, forget
from tritonfp8.layers.linear.operands import LOCAL, NO_PAIR, OperandProvider, Pair, Specs
from tritonfp8.layers.linear.transforms import transformed
from tritonfp8.layers.linear.weight_source import (
    CASTS,
    Operands,
    WeightSource,
    check_cached,
    pair_of,
    source_for,
    source_of,
)
from tritonfp8.layers.tensor_types import PLAIN, TENSORS, handler_of
from tritonfp8.layers.unsupported import refuse_compiled_transform, refuse_transform
from tritonfp8.ops import graph_op, is_exporting, is_traced
from tritonfp8.ops.passes import MOST_WORK
from tritonfp8.recipes import Recipe, get, recipe_of
from tritonfp8.specs.checks import require_type

NO_PAIRS = NO_PAIR, NO_PAIR
# Of nodes of autograd, without "Backward": activations, what they are written with, and views.
ELEMENTWISE = frozenset(
    {
        *("Elu", "Gelu", "Hardtanh", "LeakyRelu", "Relu", "Sigmoid", "Silu", "Softplus", "Tanh"),
        *("Add", "Div", "Erf", "Exp", "Mul", "Neg", "Pow", "Sqrt", "Sub"),
        *("Clone", "ToCopy", "UnsafeView", "View"),
    }
)


def _may_cast_again(weight: Tensor, shares_input: bool, input: Tensor | None = None) -> bool:
    """Whether backward should cast the input again for ``grad_weight``, so that forward need not save the cast.

    In backward a compiled graph mostly has the source of a layer's input: the residual stream before a norm, the result
    of attention. Casting the input again saves one byte an element and moves two more. The wide input of a single
    layer, such as the activation of an MLP, has to be recomputed and written first, which costs twice as much. So it is
    only cast again if it is made of one tensor, as GELU's is: where two make it (SwiGLU), both and the copy would be in
    memory at once, which takes more than the casts of a few layers.

    Args:
        weight: ``[N, K]``.
        shares_input: whether other layers read the same input.
        input: ``[..., K]``, where its history is known.
    """
    return shares_input or weight.shape[1] <= weight.shape[0] or (input is not None and _is_made_of_one(input))


def _is_made_of_one(x: Tensor) -> bool:
    """Whether element-wise functions of a single tensor made ``x``."""
    sources, seen, left = set(), set(), [(x.grad_fn, x.output_nr)]
    while left:
        node, output = left.pop()
        if node is None or node in seen:
            continue
        if not _is_elementwise(node):
            sources.add((node, output))
            continue
        seen.add(node)
        left += node.next_functions
    return len(sources) == 1 and bool(seen)


def _is_elementwise(node: torch.autograd.graph.Node) -> bool:
    return node.name().removesuffix("0").removesuffix("Backward") in ELEMENTWISE


def _is_made_in_graph(x: Tensor) -> bool:
    """Whether the traced graph computes ``x``; otherwise ``x`` is one of its inputs."""
    if torch.compiler.is_dynamo_compiling():
        return not x.is_leaf
    # An input of a graph has no autograd history, or one that raises when it is used.
    return x.grad_fn is not None and x.grad_fn.name() != "torch::autograd::Error"


def cast_operands(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands in the dtype to compute in, checked."""
    dtype = autocast_dtype(input.device.type)
    if dtype is not None:
        input, weight, bias = (cast_to(dtype, x) for x in (input, weight, bias))  # type: ignore[assignment]
    if not fit(input, weight, bias):
        check_linear(input, weight, bias)
    return input, weight, bias


def _chained(plan: LinearPlan, rows: Tensor, weight: Tensor, recipe: str) -> LinearPlan:
    """``plan``, by which the ops of forward are one call, and the ops of backward: in eager code, where they are small.

    ``recipe``: the text of the recipe of ``plan``.
    """
    if torch.compiler.is_compiling() or dispatch_mode_count():
        return plan
    if plan.weight_is_cached or plan.casts_input_again or plan.layer is not None:
        return plan
    is_small = rows.shape[0] * weight.numel() <= MOST_WORK
    return LinearPlan(*plan[:-1], recipe) if is_small and may_chain(recipe) else plan


def local_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    *,
    quantized_weight: Operands | None = None,
    shared_input: SharedInput | None = None,
    shared_as: Tensor | None = None,
    own_rows: Tensor | None = None,
    provider: OperandProvider = LOCAL,
    source: WeightSource = CASTS,
    may_cast_again: bool = False,
) -> Tensor:
    """:func:`linear` on the local tensors of this rank; handlers of other tensor types call it on shards.

    Args:
        input, weight, bias, recipe, quantized_weight, shared_input: see :func:`linear`.
        shared_as: the tensor under which sibling layers share the cast input. Default: ``input``.
        own_rows: ``[M, K]``, what ``provider`` makes the input's operands of, if those are not the rows of ``input``.
        provider, source: see :class:`OperandProvider` and :class:`WeightSource`.
        may_cast_again: whether backward of a compiled graph may cast the input again; see :func:`_may_cast_again`.
    """
    shared_as = input if shared_as is None else shared_as  # Siblings are called with what autocast has not cast yet.
    input, weight, bias = cast_operands(input, weight, bias)
    rows = input if input.ndim == 2 else (input if input.ndim > 1 else torch.atleast_2d(input)).flatten(0, -2)
    grad = torch.is_grad_enabled()
    needs = (grad and input.requires_grad, grad and weight.requires_grad)
    again = may_cast_again and needs[1] and recipe.grad_weight.rhs is not None and _is_made_in_graph(shared_as)
    layer = counting.take_callers()[0] if counting.is_logging else None
    source = source if recipe.weights is None else source_for(recipe, weight, source)
    plan = LinearPlan(recipe, *needs, quantized_weight is not None, provider, source, again, layer)
    if own_rows is None and provider is LOCAL and source is CASTS:
        plan = _chained(plan, rows, weight, *recipe.args)
    specs = Specs(recipe.output.lhs, recipe.grad_weight.rhs if needs[1] else None, recipe.codes["input"])
    data = (rows if own_rows is None else own_rows).detach()
    if again:
        pair, amax_t = provider.input_now(data, specs)
        pairs: tuple[Pair, Pair] = pair, (None, amax_t)
    elif shared_input is None:
        if not torch.compiler.is_compiling():
            forget()
        pairs = NO_PAIRS if plan.chained is not None else provider.input(data, specs)
    else:
        if not isinstance(shared_input, SharedInput):
            require_type("shared_input", shared_input, SharedInput, "a tritonfp8.functional.SharedInput or None")
        pairs = shared_input.quantize(shared_as, data, specs, provider)
    if plan.chained is not None:
        weight_pair, cached, amax_t = NO_PAIR, NO_PAIR, None
    elif quantized_weight is None:
        weight_pair, amax_t = source.now(weight, weight_specs(recipe, needs[0]))
        cached = NO_PAIR
    else:
        check_cached(quantized_weight, weight, recipe, plan.needs_grad_input)
        weight_pair, cached, amax_t = pair_of(quantized_weight[0]), pair_of(quantized_weight[1]), None
    out: Tensor = LinearFunction.apply(  # type: ignore[no-untyped-call]
        rows, weight, bias, plan, amax_t, *pairs[0], *pairs[1], *weight_pair, *cached
    )
    return out if input.ndim == 2 else out.reshape(*input.shape[:-1], weight.shape[0])


def _linear_in_transform(
    input: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, quantized_weight: Operands | None
) -> Tensor:
    """:func:`linear` while a transform of ``torch.func`` or a forward-mode derivative is open."""
    if handler_of(input, weight, bias) is not None or source_of(weight) is not CASTS:
        refuse_transform(f"a weight of type {type(weight).__name__}", "Call the layer outside of the transform")
    if is_functionalized():
        # It takes ops, not autograd functions.
        return _linear_in_trace(input, weight, bias, recipe, quantized_weight)
    x, w, b = cast_operands(input, weight, bias)
    if quantized_weight is not None:
        check_cached(quantized_weight, w, recipe, False)
    return transformed(x, w, b, recipe, quantized_weight)


def _linear_of_op(
    input: Tensor, weight: Tensor, bias: Tensor | None, recipe: str, shares_input: bool, *key: object
) -> Tensor:
    if is_transformed():
        refuse_compiled_transform()
    again = _may_cast_again(weight, shares_input, input)
    return local_linear(input, weight, bias, recipe_of(recipe), may_cast_again=again)


ops.implement("linear", _linear_of_op)


def _linear_in_graph(
    input: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, shared_input: SharedInput | None
) -> Tensor:
    """:func:`linear` of plain tensors while Dynamo traces."""
    # An error that is raised inside the op reaches the caller as a RuntimeError of the compiler.
    check_shapes(input, weight, bias)
    dtype = autocast_dtype(input.device.type)
    if dtype is None:
        check_dtypes(input, weight, bias)
    shares_input = shared_input is not None
    return graph_op.call(input, weight, bias, *recipe.args, shares_input, dtype or input.dtype, graph_op.CODE)


def _linear_in_trace(
    input: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, quantized_weight: Operands | None
) -> Tensor:
    """:func:`linear` as one op with its gradient, for the graph that is being traced."""
    x, w, b = cast_operands(input, weight, bias)
    cached: Operands = (None, None)
    if quantized_weight is not None:
        needs_grad_input = torch.is_grad_enabled() and x.requires_grad
        check_cached(quantized_weight, w, recipe, needs_grad_input)
        cached = quantized_weight
    return ops.whole_linear(x, w, *recipe.args, b, *pair_of(cached[0]), *pair_of(cached[1]))


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: str | Recipe = "rowwise",
    *,
    quantized_weight: Operands | None = None,
    shared_input: SharedInput | None = None,
    output_placements: Sequence[Any] | None = None,
) -> Tensor:
    """``input @ weight.T + bias``, its three GEMMs by ``recipe``; differentiable once, composes with ``torch.compile``.

    Args:
        input: ``[..., K]``; any leading dims, empty ones too.
        weight: ``[N, K]``, in the dtype of ``input`` (or any where autocast is on, which casts as ``F.linear`` does).
        bias: ``[N]`` or None.
        recipe: a name or a :class:`~tritonfp8.Recipe`.
        quantized_weight: the result of :func:`quantize_weight` for ``weight`` (for its cast, where autocast is on),
            which must not have changed since. ``weight`` still gets the gradient.
        shared_input: lets sibling layers that read the same ``input`` share its cast; see :class:`SharedInput`.
        output_placements: of the output of DTensors; see :func:`tritonfp8.distributed.sharded_linear`.

    Returns:
        ``[..., N]`` in the dtype of ``input`` (autocast's where it is on).

    Saved for backward: ``input.T`` quantized, M K bytes and scales (rowwise 4 K bytes, blockwise and mxfp8 M K / 32);
    or the input, 2 M K bytes in bf16, if ``grad_weight`` is in high precision (M K if it reads codes). Nothing, if the
    weight needs no gradient, and in most graphs, whose backward has or recomputes the input. The weight for
    ``grad_input``, as by ``F.linear`` (under autocast a copy of 2 N K bytes), and its amaxes (rowwise 4 K bytes).
    ``torch.func.grad`` gives the bits of autograd, ``vmap`` the bits of a loop; both save the input in high precision.

    Raises:
        TypeError: a dtype other than bfloat16, float16 or float32, or dtypes that differ.
        ValueError: shapes or a ``quantized_weight`` that do not fit, an unknown recipe, or placements of plain tensors.
        RuntimeError: in a second or a forward-mode derivative.
    """
    recipe = recipe if isinstance(recipe, Recipe) else get(recipe)
    compiling = torch.compiler.is_dynamo_compiling()
    if not compiling:
        recipe = recompute.decided(weight, recipe)
        if is_transformed():
            return _linear_in_transform(input, weight, bias, recipe, quantized_weight)
    traced = is_exporting() if compiling else is_traced()
    in_graph = compiling and not traced and quantized_weight is None and output_placements is None
    if in_graph and type(input) in PLAIN and type(weight) in PLAIN and type(bias) in PLAIN:
        return _linear_in_graph(input, weight, bias, recipe, shared_input)
    source = CASTS
    if type(input) not in TENSORS or type(weight) not in TENSORS or type(bias) not in PLAIN:
        if (handler := handler_of(input, weight, bias)) is not None:
            return handler(input, weight, bias, recipe, shared_input, quantized_weight, output_placements)
        source = source_of(weight)
    if output_placements is not None:
        raise ValueError("output_placements are of DTensors; got plain tensors")
    if traced and source is CASTS:
        return _linear_in_trace(input, weight, bias, recipe, quantized_weight)
    return local_linear(
        input, weight, bias, recipe, quantized_weight=quantized_weight, shared_input=shared_input, source=source,
        may_cast_again=compiling and _may_cast_again(weight, shared_input is not None),
    )  # fmt: skip
