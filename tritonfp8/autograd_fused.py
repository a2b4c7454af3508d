"""Layers whose producer is fused with quantization: RMSNorm before linears, and the SwiGLU MLP; differentiable once.

An 8-bit tensor has no gradient, so what passes between a producer and the linears that read it is a
:class:`QuantizedInput`: the quantized tensor in both orientations, and a handle of its shape that carries the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from tritonfp8 import ops
from tritonfp8.formats import HIGH_PRECISION_DTYPES
from tritonfp8.functional import _autocast, _Linear, _NoSecondDerivative, _quantize_for
from tritonfp8.functional import linear as plain_linear
from tritonfp8.functional_fused import check_norm
from tritonfp8.quantized import Quantized
from tritonfp8.recipes import Gemm, Recipe, get
from tritonfp8.specs import QuantSpec

_Pair = tuple[Tensor | None, Tensor | None]


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


def _first_order(compute: Callable[[], tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
    """Gradients that raise if they are differentiated in turn. Grad mode is on here where create_graph asked for it."""
    differentiable = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    with torch.no_grad():
        grads = compute()
    if not differentiable:
        return grads
    apply = _NoSecondDerivative.apply
    return tuple(
        g if g is None else apply(g.requires_grad_())  # type: ignore[no-untyped-call]
        for g in grads
    )


def _handle(x: Tensor) -> Tensor:
    return x.new_empty(()).expand(x.shape)


class _QuantizeInput(torch.autograd.Function):
    """``x [M, K]`` quantized for its linears; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: QuantSpec, spec_t: QuantSpec | None) -> tuple[Tensor, ...]:
        pairs = _quantize_for(x, spec, spec_t)
        quantized = [t for pair in pairs for t in pair if t is not None]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*quantized)
        return _handle(x), *quantized

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
        return _handle(x), *quantized

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *none: None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 6
        needs_weight = ctx.needs_input_grad[1]

        def compute() -> tuple[Tensor | None, ...]:
            x, weight, rstd = ctx.saved_tensors
            grads = ops.rms_norm_backward(grad, x, weight, rstd, ctx.rounding, None, needs_weight)
            return grads[0], grads[1] if needs_weight else None

        return *_first_order(compute), None, None, None, None


class _QuantizedLinear(torch.autograd.Function):
    """As the linear layer of a tensor, from what is quantized already."""

    @staticmethod
    def forward(
        ctx: Any, handle: Tensor, qdata: Tensor, scale: Tensor, qdata_t: Tensor | None, scale_t: Tensor | None,
        weight: Tensor, bias: Tensor | None, recipe: Recipe, needs: tuple[bool, bool],
    ) -> Tensor:  # fmt: skip
        out = _product(
            recipe.output, (qdata, scale), _quantized_weight(weight, recipe.output, False), handle.dtype, bias=bias
        )
        needs_input, needs_weight = needs
        kept = (qdata_t, scale_t) if needs_weight else (None, None)
        ctx.save_for_backward(weight if needs_input else None, None, *kept)
        ctx.recipe = recipe
        ctx.needs = (*needs, bias is not None and bias.requires_grad)
        ctx.dtypes = (handle.dtype, weight.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grad_input, grad_weight, grad_bias, *_ = _Linear.backward(ctx, grad_output)
        return grad_input, None, None, None, None, grad_weight, grad_bias, None, None


def _quantized_weight(weight: Tensor, gemm: Gemm, transpose: bool) -> _Pair:
    assert gemm.rhs is not None
    return ops.quantize(weight, *gemm.rhs.args, transpose)


def _product(
    gemm: Gemm, lhs: _Pair, rhs: _Pair, out_dtype: torch.dtype,
    bias: Tensor | None = None, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    assert gemm.lhs is not None
    assert gemm.rhs is not None
    return ops.scaled_matmul(
        lhs[0], lhs[1], *gemm.lhs.args[:3], rhs[0], rhs[1], *gemm.rhs.args[:3],
        bias, None, residual, out_dtype, gemm.accumulation,
    )  # fmt: skip


def _pairs(results: list[Tensor], spec: object, spec_t: object) -> tuple[_Pair, _Pair]:
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

    Saved, for M rows and F features inside: gate and up, 4 M F bytes in bf16; their product transposed in 8 bits, M F
    bytes and scales; the input transposed in 8 bits, which other linears may share. The gradients of gate and up exist
    only in 8 bits.
    """

    @staticmethod
    def forward(
        ctx: Any, handle: Tensor, qdata: Tensor, scale: Tensor, qdata_t: Tensor | None, scale_t: Tensor | None,
        gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor, recipe: Recipe, needs: tuple[bool, ...],
    ) -> Tensor:  # fmt: skip
        dtype = handle.dtype
        gate, up = (
            _product(recipe.output, (qdata, scale), _quantized_weight(w, recipe.output, False), dtype)
            for w in (gate_weight, up_weight)
        )
        spec, spec_t = _specs(recipe)
        keep = spec_t if needs[3] else None
        hidden, hidden_t = _pairs(ops.silu_mul_quantize(gate, up, *_fused_args(spec, keep)), spec, keep)
        out = _product(recipe.output, hidden, _quantized_weight(down_weight, recipe.output, False), dtype)
        inner = any(needs[:3])
        kept = (qdata_t, scale_t) if needs[1] or needs[2] else (None, None)
        weights = (gate_weight if needs[0] else None, up_weight if needs[0] else None, down_weight if inner else None)
        ctx.save_for_backward(*((gate, up) if inner else (None, None)), *weights, *kept, *hidden_t)
        ctx.recipe, ctx.needs, ctx.dtype = recipe, needs, dtype
        ctx.weight_dtype = down_weight.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grad_input, *grads = _first_order(lambda: _SwiGLU._grads(ctx, grad_output))
        return grad_input, None, None, None, None, *grads, None, None

    @staticmethod
    def _grads(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, gate_weight, up_weight, down_weight, *quantized = ctx.saved_tensors
        needs_input, needs_gate, needs_up, needs_down = ctx.needs
        recipe: Recipe = ctx.recipe
        left = recipe.grad_input.lhs if any(ctx.needs[:3]) else None
        right = recipe.grad_weight.lhs if needs_down else None
        pair, pair_t = _quantize_for(grad_output, left, right)
        grad_down = grad_input = grad_gate = grad_up = None
        if needs_down:
            grad_down = _product(recipe.grad_weight, pair_t, tuple(quantized[2:]), ctx.weight_dtype)
        if left is None:
            return grad_input, grad_gate, grad_up, grad_down
        grad_hidden = _product(
            recipe.grad_input, pair, _quantized_weight(down_weight, recipe.grad_input, True), ctx.dtype
        )
        spec = left if needs_input else None
        spec_t = recipe.grad_weight.lhs if needs_gate or needs_up else None
        stacked = ops.silu_mul_backward_quantize(grad_hidden, gate, up, *_fused_args(spec, spec_t))
        (of_gate, of_gate_t), (of_up, of_up_t) = (_pairs([t[i] for t in stacked], spec, spec_t) for i in (0, 1))
        if needs_input:
            for side, weight in ((of_gate, gate_weight), (of_up, up_weight)):
                rhs = _quantized_weight(weight, recipe.grad_input, True)
                grad_input = _product(recipe.grad_input, side, rhs, ctx.dtype, residual=grad_input)
        kept = tuple(quantized[:2])
        if needs_gate:
            grad_gate = _product(recipe.grad_weight, of_gate_t, kept, ctx.weight_dtype)
        if needs_up:
            grad_up = _product(recipe.grad_weight, of_up_t, kept, ctx.weight_dtype)
        return grad_input, grad_gate, grad_up, grad_down


def _as_input(x: Tensor, results: tuple[Tensor, ...], spec: QuantSpec, spec_t: QuantSpec | None) -> QuantizedInput:
    handle, *quantized = results
    transposed = None if spec_t is None else Quantized(quantized[2], quantized[3], spec_t)
    return QuantizedInput(handle.reshape(x.shape), Quantized(quantized[0], quantized[1], spec), transposed)


def _folded(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else torch.atleast_2d(x).flatten(0, -2)


def _check_input(x: Tensor) -> None:
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
    (cast,) = _autocast(x.device.type, x)
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
    spec, spec_t = _specs(get(recipe))
    _check_input(x)
    check_norm(x, weight, rounding)
    (cast,) = _autocast(x.device.type, x)
    assert cast is not None
    if cast.dtype != x.dtype:
        return quantize_input(rms_norm(x, weight, eps, rounding), recipe)
    kept = spec_t if torch.is_grad_enabled() else None
    results = _RMSNorm.apply(_folded(x), weight, eps, rounding, spec, kept)  # type: ignore[no-untyped-call]
    return _as_input(x, results, spec, kept)


def _check_reader(input: QuantizedInput, recipe: Recipe, needs_transposed: bool, **weights: Tensor) -> None:
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
    for name, weight in weights.items():
        if weight.ndim != 2 or weight.shape[1] != input.shape[-1] or weight.dtype != input.dtype:
            raise ValueError(
                f"{name} must be {input.dtype} of shape [N, {input.shape[-1]}]; "
                f"got {weight.dtype} of shape {tuple(weight.shape)}"
            )


def _tensors(input: QuantizedInput) -> tuple[Tensor | None, ...]:
    transposed = (None, None) if input.transposed is None else (input.transposed.qdata, input.transposed.scale)
    return _folded(input.handle), input.normal.qdata, input.normal.scale, *transposed


def quantized_linear(
    input: QuantizedInput, weight: Tensor, bias: Tensor | None = None, recipe: str | Recipe = "rowwise"
) -> Tensor:
    """:func:`tritonfp8.functional.linear` of an input that is quantized already, to the same bits.

    Args:
        input: ``[..., K]``, quantized by the same recipe.
        weight: ``[N, K]``, in the dtype of the input (or any where autocast is on).
        bias: ``[N]`` or None.
        recipe: a name or a :class:`~tritonfp8.Recipe` whose three products are quantized.

    Returns:
        ``[..., N]`` in the dtype of the input.

    Raises:
        ValueError: shapes, dtypes or specs that do not go together.
        RuntimeError: when a gradient of the gradient is asked for.
    """
    recipe = get(recipe)
    cast, cast_bias = _autocast(input.device.type, weight, bias)
    assert cast is not None
    grad = torch.is_grad_enabled()
    needs = (grad and input.handle.requires_grad, grad and cast.requires_grad)
    _check_reader(input, recipe, needs[1], weight=cast)
    if cast_bias is not None and (tuple(cast_bias.shape) != (cast.shape[0],) or cast_bias.dtype != input.dtype):
        raise ValueError(
            f"bias must be {input.dtype} of shape ({cast.shape[0]},); got {cast_bias.dtype} of {tuple(cast_bias.shape)}"
        )
    out: Tensor = _QuantizedLinear.apply(  # type: ignore[no-untyped-call]
        *_tensors(input), cast, cast_bias, recipe, needs
    )
    return out.reshape(*input.shape[:-1], cast.shape[0])


def swiglu(
    input: Tensor | QuantizedInput,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    recipe: str | Recipe = "rowwise",
) -> Tensor:
    """The SwiGLU MLP, ``(silu(x gate_weight.T) * (x up_weight.T)) down_weight.T``, its nine products by ``recipe``.

    Args:
        input: ``[..., K]``, a tensor, or what :func:`quantized_rms_norm` made of one by the same recipe.
        gate_weight, up_weight: ``[F, K]``, in the dtype of the input (or any where autocast is on).
        down_weight: ``[N, F]``, likewise.
        recipe: a name or a :class:`~tritonfp8.Recipe`. One that keeps a product in high precision runs as three linears
            and takes a tensor only.

    Returns:
        ``[..., N]`` in the dtype of the input.

    Raises:
        ValueError: shapes, dtypes or specs that do not go together.
        RuntimeError: when a gradient of the gradient is asked for.
    """
    recipe = get(recipe)
    if not is_fusable(recipe) and isinstance(input, Tensor):
        hidden = F.silu(plain_linear(input, gate_weight, None, recipe)) * plain_linear(input, up_weight, None, recipe)
        return plain_linear(hidden, down_weight, None, recipe)
    if isinstance(input, Tensor):
        input = quantize_input(input, recipe)
    weights = [w for w in _autocast(input.device.type, gate_weight, up_weight, down_weight) if w is not None]
    grad = torch.is_grad_enabled()
    needs = tuple(grad and t.requires_grad for t in (input.handle, *weights))
    _check_reader(input, recipe, needs[1] or needs[2], gate_weight=weights[0], up_weight=weights[1])
    inner = weights[0].shape[0]
    shapes = (
        tuple(weights[1].shape) == tuple(weights[0].shape) and weights[2].ndim == 2 and weights[2].shape[1] == inner
    )
    if not shapes or weights[2].dtype != input.dtype:
        raise ValueError(
            f"swiglu needs gate_weight and up_weight [F, K] and down_weight [N, F] of one dtype; "
            f"got {', '.join(f'{w.dtype} {tuple(w.shape)}' for w in weights)}"
        )
    out: Tensor = _SwiGLU.apply(*_tensors(input), *weights, recipe, needs)  # type: ignore[no-untyped-call]
    return out.reshape(*input.shape[:-1], weights[2].shape[0])
