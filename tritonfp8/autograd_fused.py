"""Layers whose producer is fused with quantization: RMSNorm before linears, and the SwiGLU MLP; differentiable once.

An 8-bit tensor has no gradient, so what passes between a producer and the linears that read it is a
:class:`QuantizedInput`: the quantized tensor in both orientations, and a handle of its shape that carries the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from tritonfp8 import ops
from tritonfp8.formats import HIGH_PRECISION_DTYPES
from tritonfp8.functional_fused import check_norm
from tritonfp8.linear import (
    Plan,
    apply_linear,
    held_for_backward,
    multiply,
    pair_of,
    weight_pairs,
    weight_t,
)
from tritonfp8.linear import linear as plain_linear
from tritonfp8.linear_checks import autocast_all, check_linear
from tritonfp8.operands import NO_PAIR, WHOLE, Operands, Pair, quantize_for
from tritonfp8.quantized import Quantized
from tritonfp8.recipes import Recipe, get
from tritonfp8.recompute import decided
from tritonfp8.second_derivative import first_order
from tritonfp8.specs import QuantSpec, check_strided, require_type, shown
from tritonfp8.traced_op import sealed


def is_fusable(recipe: str | Recipe) -> bool:
    """Whether all three products of a recipe are quantized: nothing then reads a result in high precision."""
    return get(recipe).quantized_share == 1


def _specs(recipe: Recipe) -> tuple[QuantSpec, QuantSpec]:
    """Of the input of a linear as ``output`` reads it, and of its transpose as ``grad_weight`` does."""
    spec, spec_t = recipe.output.lhs, recipe.grad_weight.rhs
    if spec is None or spec_t is None or recipe.grad_input.lhs is None:
        raise ValueError(
            f"a fused layer needs a recipe whose three products are quantized; {recipe.name!r} keeps one in high "
            "precision. Use another recipe, or the layers as they are."
        )
    return spec, spec_t


@dataclass(frozen=True, eq=False)
class QuantizedInput:
    """The input of one or more linears, quantized once: what RMSNorm hands on in place of a tensor.

    A pytree node. ``shape``, ``dtype``, ``device`` and ``ndim`` are those of the tensor that it stands for.

    Attributes:
        handle: ``[..., K]`` without contents of its own: it carries the gradient and the shape.
        normal: the tensor folded to ``[M, K]``, quantized for ``output``.
        transposed: its transpose ``[K, M]``, quantized for ``grad_weight``; None where nothing will be differentiated.
    """

    handle: Tensor
    normal: Quantized
    transposed: Quantized | None

    @property
    def shape(self) -> torch.Size:
        """``[..., K]``."""
        return self.handle.shape

    @property
    def ndim(self) -> int:
        """Number of dims of the tensor that this stands for."""
        return self.handle.ndim

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the tensor was rounded to before it was quantized: that of the linears' results."""
        return self.handle.dtype

    @property
    def device(self) -> torch.device:
        """Where the data lies."""
        return self.handle.device


pytree.register_pytree_node(
    QuantizedInput,
    lambda x: ([x.handle, x.normal, x.transposed], None),
    lambda children, _: QuantizedInput(*children),
    serialized_type_name="tritonfp8.QuantizedInput",
)


def _handle(x: Tensor) -> Tensor:
    return x.new_empty(()).expand(x.shape)


class _QuantizeInput(torch.autograd.Function):
    """``x [M, K]`` quantized for its linears; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: QuantSpec, spec_t: QuantSpec | None) -> tuple[Tensor, ...]:
        pairs = quantize_for(x, spec, spec_t)
        quantized = [t for pair in pairs for t in pair if t is not None]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*quantized)
        return sealed(_handle(x), x), *quantized

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *none: None) -> tuple[Tensor | None, ...]:
        return grad, None, None


class _RMSNorm(torch.autograd.Function):
    """RMSNorm of ``x [M, K]`` quantized for its linears. Saves ``x``, ``weight`` and rstd (4 M bytes)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, rounding: str, spec: QuantSpec, spec_t: QuantSpec | None
    ) -> tuple[Tensor, ...]:
        orientation = "normal" if spec_t is None else "both"
        *quantized, rstd = ops.rms_norm_quantize(
            x, weight, eps, rounding, *spec.args, *(spec_t or spec).args, orientation, False
        )
        ctx.save_for_backward(x, weight, rstd)
        ctx.rounding = rounding
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*quantized)
        return sealed(_handle(x), x, weight), *quantized

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *none: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        needs_weight = ctx.needs_input_grad[1]

        def compute() -> tuple[Tensor | None, ...]:
            x, weight, rstd = ctx.saved_tensors
            grads = ops.rms_norm_backward(grad, x, weight, rstd, ctx.rounding, None, needs_weight)
            return grads[0], grads[1] if needs_weight else None

        return *first_order(compute), None, None, None, None


def _pairs(results: list[Tensor], spec: object, spec_t: object) -> tuple[Pair, Pair]:
    """``(normal, transposed)`` of what a fused op returned, each with Nones where its spec is None."""
    rest = list(results)
    normal = (rest.pop(0), rest.pop(0)) if spec is not None else (None, None)
    transposed = (rest.pop(0), rest.pop(0)) if spec_t is not None else (None, None)
    return normal, transposed


def _fused_args(spec: QuantSpec | None, spec_t: QuantSpec | None) -> tuple[Any, ...]:
    """Specs, orientation and keep of a fused op."""
    either = spec or spec_t
    assert either is not None
    orientation = "both" if spec and spec_t else "normal" if spec else "transposed"
    return *(spec or either).args, *(spec_t or either).args, orientation, False


class _SwiGLU(torch.autograd.Function):
    """``(silu(x gate.T) * (x up.T)) down.T`` of a quantized input.

    Saved, for M rows and F features inside: gate and up, 4 M F bytes in bf16; the input transposed in 8 bits, which
    other linears may share. Their product, which the gradient of ``down`` reads transposed, is made of them again, to
    the same bits; where nothing else needs them, it is saved in their place. Gradients of gate and up exist in 8 bits
    alone.
    """

    @staticmethod
    def forward(
        ctx: Any, handle: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor,
        plans: Sequence[Plan], *quantized: Tensor | None,
    ) -> Tensor:  # fmt: skip
        input_pair, kept, *pairs = ((quantized[i], quantized[i + 1]) for i in range(0, len(quantized), 2))
        weights, held = pairs[::2], pairs[1::2]
        recipe, dtype = plans[0].recipe, handle.dtype
        gate, up = (multiply(recipe.output, input_pair, weight, None, dtype) for weight in weights[:2])
        spec, spec_t = _specs(recipe)
        inner = plans[2].needs_grad_input
        keep = spec_t if plans[2].needs_grad_weight and not inner else None
        hidden, hidden_t = _pairs(ops.silu_mul_quantize(gate, up, *_fused_args(spec, keep)), spec, keep)
        out = multiply(recipe.output, hidden, weights[2], None, dtype)
        held = [held_for_backward(*each) for each in zip(plans, weights, held, strict=True)]
        read = [
            weight if plan.needs_grad_input and pair[0] is None else None
            for plan, weight, pair in zip(plans, (gate_weight, up_weight, down_weight), held, strict=True)
        ]
        if not any(plan.needs_grad_weight for plan in plans[:2]):
            kept = NO_PAIR
        ctx.save_for_backward(
            *((gate, up) if inner else NO_PAIR), *read, *kept, *hidden_t, *(t for pair in held for t in pair)
        )
        ctx.plans, ctx.dtypes = plans, (dtype, down_weight.dtype)
        return sealed(out, handle, gate_weight, up_weight, down_weight)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grads = first_order(lambda: _SwiGLU._grads(ctx, grad_output))
        # The plans and 16 quantized tensors have none.
        return *grads, *[None] * 17

    @staticmethod
    def _grads(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, *saved = ctx.saved_tensors
        weights, kept, hidden_t = saved[:3], (saved[3], saved[4]), (saved[5], saved[6])
        held = [(saved[i], saved[i + 1]) for i in (7, 9, 11)]
        plans: Sequence[Plan] = ctx.plans
        recipe, (dtype, weight_dtype) = plans[0].recipe, ctx.dtypes
        inner, down = plans[:2], plans[2]
        left = recipe.grad_input.lhs if down.needs_grad_input else None
        right = recipe.grad_weight.lhs if down.needs_grad_weight else None
        pair, pair_t = down.quantizer.quantize("grad_output", grad_output, left, right)
        grad_down = grad_input = None
        grads: list[Tensor | None] = [None, None]
        if down.needs_grad_weight:
            if gate is not None:
                again = ops.silu_mul_quantize(gate, up, *_fused_args(None, recipe.grad_weight.rhs))
                hidden_t = (again[0], again[1])
            grad_down = multiply(recipe.grad_weight, pair_t, hidden_t, None, weight_dtype)
        if left is None:
            return grad_input, *grads, grad_down
        rhs = weight_t(down, grad_output, weights[2], held[2])
        grad_hidden = multiply(recipe.grad_input, pair, rhs, None, dtype)
        spec = left if inner[0].needs_grad_input else None
        spec_t = recipe.grad_weight.lhs if any(plan.needs_grad_weight for plan in inner) else None
        stacked = ops.silu_mul_backward_quantize(grad_hidden, gate, up, *_fused_args(spec, spec_t))
        for i, plan in enumerate(inner):
            side, side_t = _pairs([t[i] for t in stacked], spec, spec_t)
            if plan.needs_grad_input:
                rhs = weight_t(plan, grad_output, weights[i], held[i])
                grad_input = multiply(recipe.grad_input, side, rhs, None, dtype, grad_input)
            if plan.needs_grad_weight:
                grads[i] = multiply(recipe.grad_weight, side_t, kept, None, weight_dtype)
        return grad_input, *grads, grad_down


def _as_input(x: Tensor, results: tuple[Tensor, ...], spec: QuantSpec, spec_t: QuantSpec | None) -> QuantizedInput:
    handle, *quantized = results
    transposed = None if spec_t is None else Quantized(quantized[2], quantized[3], spec_t)
    return QuantizedInput(handle.reshape(x.shape), Quantized(quantized[0], quantized[1], spec), transposed)


def _folded(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else torch.atleast_2d(x).flatten(0, -2)


def _check_input(x: Tensor) -> None:
    require_type("the input", x, Tensor, "a torch.Tensor")
    check_strided("the input", x)
    if x.dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(
            f"the input must be bfloat16, float16 or float32; got {x.dtype}. Cast it, or use torch.autocast."
        )
    if x.ndim == 0:
        raise ValueError("the input must have at least one dim, [..., K]; got a scalar")


def quantize_input(x: Tensor, recipe: str | Recipe) -> QuantizedInput:
    """``x [..., K]`` quantized once for all linears of ``recipe`` that read it.

    Its transpose is quantized too where gradients are being recorded. Under autocast ``x`` is cast first, as a linear
    would cast it.

    Raises:
        TypeError: a dtype other than bfloat16, float16 or float32.
        ValueError: a scalar, or a recipe that keeps one of the products in high precision.
    """
    spec, spec_t = _specs(get(recipe))
    require_type("the input", x, Tensor, "a torch.Tensor")
    (cast,) = autocast_all(x.device.type, x)
    assert cast is not None
    _check_input(cast)
    kept = spec_t if torch.is_grad_enabled() else None
    results = _QuantizeInput.apply(_folded(cast), spec, kept)  # type: ignore[no-untyped-call]
    return _as_input(cast, results, spec, kept)


def rms_norm(x: Tensor, weight: Tensor, eps: float, rounding: str = "output") -> Tensor:
    """RMSNorm of ``x [..., K]`` in plain torch, for readers in high precision; arguments as of the fused function."""
    check_norm(x, weight, rounding)
    normalized = F.rms_norm(x.float(), x.shape[-1:], None, eps)
    if rounding == "normalized":
        normalized = normalized.to(x.dtype).float()
    return (normalized * weight.float()).to(x.dtype)


def quantized_rms_norm(
    x: Tensor, weight: Tensor, eps: float, recipe: str | Recipe, rounding: str = "output"
) -> QuantizedInput:
    """RMSNorm of ``x``, quantized for the linears of ``recipe`` that read it.

    Args:
        x: ``[..., K]``, bfloat16, float16 or float32.
        weight: ``[K]``, of those dtypes.
        eps: added to the mean square.
        recipe: a name or a :class:`~tritonfp8.Recipe` whose three products are quantized.
        rounding: ``"output"`` (``torch.nn.RMSNorm``) or ``"normalized"`` (Llama in transformers).

    Returns:
        A :class:`QuantizedInput` in the dtype of ``x``. Under autocast to another dtype the norm runs in plain torch
        and its result is cast and quantized, as a linear after it would do.

    Raises:
        TypeError: another dtype of ``x``.
        ValueError: a ``weight`` that does not fit, an unknown rounding, or a recipe with a product in high precision.
        RuntimeError: when a gradient of the gradient is asked for.
    """
    _check_tensors(x=x, weight=weight)
    require_type("eps", eps, float | int, "a float")
    recipe = decided(weight, get(recipe))
    spec, spec_t = _specs(recipe)
    _check_input(x)
    check_norm(x, weight, rounding)
    (cast,) = autocast_all(x.device.type, x)
    assert cast is not None
    if cast.dtype != x.dtype:
        return quantize_input(rms_norm(x, weight, eps, rounding), recipe)
    kept = spec_t if torch.is_grad_enabled() else None
    results = _RMSNorm.apply(_folded(x), weight, eps, rounding, spec, kept)  # type: ignore[no-untyped-call]
    return _as_input(x, results, spec, kept)


def _check_reader(input: QuantizedInput, recipe: Recipe, needs_transposed: bool) -> None:
    spec, spec_t = _specs(recipe)
    made = input.normal.spec, spec_t if input.transposed is None else input.transposed.spec
    if made != (spec, spec_t):
        raise ValueError(
            f"the input was quantized as {made[0]} and {made[1]}; {recipe.name!r} reads {spec} and {spec_t}"
        )
    if needs_transposed and input.transposed is None:
        raise ValueError(
            "the input was quantized while no gradients were recorded, and the gradient of a weight needs its "
            "transpose: quantize it within the same grad mode"
        )


def _check_tensors(**tensors: object) -> None:
    for name, x in tensors.items():
        require_type(name, x, Tensor, "a torch.Tensor")


def is_distributed(x: Tensor | None) -> bool:
    """Whether ``x`` is a DTensor; without an import of torch's."""
    return type(x).__module__.startswith("torch.distributed")


def check_whole(*weights: Tensor | None) -> None:
    """Raise TypeError unless fused layers can compute with these weights: none is a distributed tensor."""
    for weight in weights:
        if not torch.compiler.is_compiling() and is_distributed(weight):
            raise TypeError(
                f"fused layers compute with whole weights; got a {type(weight).__name__}. Call parallelize_module "
                "before tritonfp8.convert(model, recipe, fuse=True), which leaves alone what is sharded, or convert "
                "without fusing. FSDP2, which shards weights between uses, goes with fused layers."
            )


def quantized_linear(
    input: QuantizedInput,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: str | Recipe = "rowwise",
    *,
    quantized_weight: Operands | None = None,
) -> Tensor:
    """:func:`tritonfp8.functional.linear` of an input that is quantized already, to the same bits.

    Args:
        input: ``[..., K]``, quantized by the same recipe.
        weight: ``[N, K]``, in the dtype of the input (or any where autocast is on).
        bias: ``[N]`` or None.
        recipe: a name or a :class:`~tritonfp8.Recipe` whose three products are quantized.
        quantized_weight: as of :func:`tritonfp8.functional.linear`.

    Returns:
        ``[..., N]`` in the dtype of the input.

    Raises:
        TypeError: dtypes that differ, or a distributed tensor.
        ValueError: shapes or specs that do not go together.
        RuntimeError: when a gradient of the gradient is asked for.
    """
    _check_tensors(weight=weight)
    if bias is not None:
        _check_tensors(bias=bias)
    require_type("input", input, QuantizedInput, "a QuantizedInput, as quantize_input and quantized_rms_norm return")
    recipe = decided(weight, get(recipe))
    check_whole(weight, bias)
    cast, cast_bias = autocast_all(input.device.type, weight, bias)
    assert cast is not None
    check_linear(input.handle, cast, cast_bias)
    grad = torch.is_grad_enabled()
    needs = (grad and input.handle.requires_grad, grad and cast.requires_grad)
    _check_reader(input, recipe, needs[1])
    plan = Plan(recipe, *needs, quantized_weight is not None, WHOLE, no_op_has_gradient=True)
    pairs = pair_of(input.normal), pair_of(input.transposed) if needs[1] else NO_PAIR
    out = apply_linear(_folded(input.handle), pairs, cast, cast_bias, plan, quantized_weight)
    return out.reshape(*input.shape[:-1], cast.shape[0])


def _swiglu_by_linears(x: Tensor, weights: Sequence[Tensor], recipe: Recipe, held: Sequence[Operands | None]) -> Tensor:
    gate, up = (plain_linear(x, weights[i], None, recipe, quantized_weight=held[i]) for i in (0, 1))
    return plain_linear(F.silu(gate) * up, weights[2], None, recipe, quantized_weight=held[2])


def _check_mlp(weights: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Raise unless the weights of gate, up and down go together; gate and up fit the input already."""
    check_strided("down_weight", weights[2])
    inner = weights[0].shape[0]
    fits = weights[1].shape[0] == inner and weights[2].ndim == 2 and weights[2].shape[1] == inner
    if not fits or weights[2].dtype != dtype:
        raise ValueError(
            f"swiglu needs gate_weight and up_weight [F, K] and down_weight [N, F] of one dtype; "
            f"got {', '.join(f'{w.dtype} {tuple(w.shape)}' for w in weights)}"
        )


def swiglu(
    input: Tensor | QuantizedInput,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    recipe: str | Recipe = "rowwise",
    *,
    quantized_weights: Sequence[Operands | None] = (None, None, None),
) -> Tensor:
    """The SwiGLU MLP, ``(silu(x gate_weight.T) * (x up_weight.T)) down_weight.T``, its nine products by ``recipe``.

    Args:
        input: ``[..., K]``, a tensor, or what :func:`quantized_rms_norm` made of one by the same recipe.
        gate_weight, up_weight: ``[F, K]``, in the dtype of the input (or any where autocast is on).
        down_weight: ``[N, F]``, likewise.
        recipe: a name or a :class:`~tritonfp8.Recipe`. One that keeps a product in high precision runs as three linears
            and takes a tensor only.
        quantized_weights: of the three, each as of :func:`tritonfp8.functional.linear`.

    Returns:
        ``[..., N]`` in the dtype of the input.

    Raises:
        TypeError: dtypes that differ, or a distributed tensor.
        ValueError: shapes or specs that do not go together.
        RuntimeError: when a gradient of the gradient is asked for.
    """
    _check_tensors(gate_weight=gate_weight, up_weight=up_weight, down_weight=down_weight)
    require_type("input", input, Tensor | QuantizedInput, "a torch.Tensor or a QuantizedInput")
    if not isinstance(quantized_weights, tuple | list) or len(quantized_weights) != 3:
        raise TypeError(f"quantized_weights must be three, of gate, up and down; got {shown(quantized_weights)}")
    recipe = decided(down_weight, get(recipe))
    given = (gate_weight, up_weight, down_weight)
    if not is_fusable(recipe) and isinstance(input, Tensor):
        return _swiglu_by_linears(input, given, recipe, quantized_weights)
    check_whole(*given)
    if isinstance(input, Tensor):
        input = quantize_input(input, recipe)
    weights = [w for w in autocast_all(input.device.type, *given) if w is not None]
    for weight in weights[:2]:
        check_linear(input.handle, weight, None)
    _check_mlp(weights, input.dtype)
    grad = torch.is_grad_enabled()
    needs_input, *needs = (grad and t.requires_grad for t in (input.handle, *weights))
    _check_reader(input, recipe, needs[0] or needs[1])
    needs_inputs = (needs_input, needs_input, needs_input or needs[0] or needs[1])
    plans = tuple(
        Plan(recipe, needs_input, needs_weight, held is not None, WHOLE)
        for needs_input, needs_weight, held in zip(needs_inputs, needs, quantized_weights, strict=True)
    )
    pairs = [weight_pairs(*each) for each in zip(weights, plans, quantized_weights, strict=True)]
    flat = [t for of_weight in pairs for pair in of_weight for t in pair]
    out: Tensor = _SwiGLU.apply(  # type: ignore[no-untyped-call]
        _folded(input.handle), *weights, plans, *pair_of(input.normal), *pair_of(input.transposed), *flat
    )
    return out.reshape(*input.shape[:-1], weights[2].shape[0])
