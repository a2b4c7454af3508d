"""quantize, dequantize, scaled_matmul on :class:`Quantized`, and a linear layer whose GEMMs follow a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.formats import HIGH_PRECISION_DTYPES
from tritonfp8.quantized import Quantized
from tritonfp8.recipes import Gemm, Recipe, get
from tritonfp8.specs import (
    ACCUMULATIONS,
    ACTIVATIONS,
    BLOCKS,
    QuantSpec,
    check_floating,
    matmul_family,
    require,
    scale_shape,
)


def _check_spec(spec: object) -> None:
    if not isinstance(spec, QuantSpec):
        raise TypeError(f"spec must be a tritonfp8.QuantSpec; got {type(spec).__name__}")


def _check_matrix(x: Tensor, what: str) -> None:
    if x.ndim != 2:
        raise ValueError(f"{what} needs a 2-D tensor; got shape {tuple(x.shape)}. Flatten the leading dims first.")


def amax(x: Tensor, block: Sequence[int]) -> Tensor:
    """Largest magnitude of each block of ``x``.

    Args:
        x: ``[..., K]``, bfloat16, float16, float32 or float64.
        block: ``(rows, cols)`` of the last two dims; -1 is the whole dimension, and as rows it takes in all leading
        dims.

    Returns:
        float32, one value a block: 0 for an empty block, infinite or NaN where the block holds such a value.

    Raises:
        TypeError: ``x`` is not a floating tensor of those dtypes.
        ValueError: no such block, or ``x`` has too few dims for it.
    """
    check_floating("x", x)
    require("block", tuple(block), tuple(BLOCKS))
    scale_shape(x.shape, block)
    return ops.amax(x.detach(), list(block))


def quantize(x: Tensor, spec: QuantSpec, transpose: bool = False, amax: Tensor | None = None) -> Quantized:
    """Quantize ``x``, or its transpose.

    Args:
        x: ``[..., K]``, bfloat16, float16, float32 or float64, of any strides. 2-D if ``transpose``.
        spec: format, block and scale of the result.
        transpose: quantize ``x.T`` instead, contiguous: K-major for a contraction over the rows of ``x``.
        amax: float32, one value for each block of the result, used in place of the block's own (of the whole tensor
        where
            ``x`` is a shard of it, say). What lies beyond saturates.

    Returns:
        A :class:`Quantized` of the shape of ``x`` (or ``x.T``). It carries no gradient: gradients flow through
        :func:`linear`.

    Raises:
        TypeError: ``x`` is not a floating tensor of those dtypes, or ``spec`` no QuantSpec.
        ValueError: too few or too many dims, or an ``amax`` of another shape or dtype.

    The formulas are those of :mod:`tritonfp8.reference`.
    """
    check_floating("x", x)
    _check_spec(spec)
    if transpose:
        _check_matrix(x, "quantize(transpose=True)")
    shape = x.shape[::-1] if transpose else x.shape
    expected = scale_shape(shape, spec.block)
    if amax is not None and (tuple(amax.shape) != expected or amax.dtype != torch.float32):
        raise ValueError(f"amax must be float32 of shape {expected}; got {amax.dtype} of shape {tuple(amax.shape)}")
    qdata, scale = ops.quantize(x.detach(), *spec.args, transpose, amax)
    return Quantized(qdata, scale, spec)


def quantize_both(x: Tensor, spec: QuantSpec, spec_t: QuantSpec) -> tuple[Quantized, Quantized]:
    """``(quantize(x, spec), quantize(x, spec_t, transpose=True))``, in one pass over ``x`` where the scales allow it.

    Blocks of a whole dimension (tensorwise, rowwise) need the amax first: one more pass, for both results together.

    Args:
        x: ``[M, K]``, bfloat16, float16, float32 or float64, of any strides.
        spec: of the first result, ``[M, K]``.
        spec_t: of the second, ``[K, M]``, in the coordinates of ``x.T``.

    Raises:
        TypeError, ValueError: as :func:`quantize`.
    """
    check_floating("x", x)
    _check_spec(spec)
    _check_spec(spec_t)
    _check_matrix(x, "quantize_both")
    qdata, scale, qdata_t, scale_t = ops.quantize_both(x.detach(), *spec.args, *spec_t.args)
    return Quantized(qdata, scale, spec), Quantized(qdata_t, scale_t, spec_t)


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """``float32(qdata) * float32(scale)``, rounded to ``dtype`` (bfloat16, float16 or float32), in the shape of ``q``.

    Raises:
        TypeError: ``q`` is not Quantized.
        ValueError: another dtype.
    """
    _check_quantized("q", q)
    require("dtype", dtype, HIGH_PRECISION_DTYPES)
    return ops.dequantize(q.qdata, q.scale, *q.spec.args, dtype)


def _check_quantized(name: str, q: object) -> None:
    if not isinstance(q, Quantized):
        raise TypeError(f"{name} must be a tritonfp8.Quantized (see tritonfp8.quantize); got {type(q).__name__}")


def _check_operand(name: str, x: Tensor | None, shape: tuple[int, ...], device: torch.device) -> None:
    if x is None:
        return
    check_floating(name, x)
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}; got {tuple(x.shape)}")
    if x.device != device:
        raise ValueError(f"{name} must be on {device}, where a is; got {x.device}")
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(
            f"scaled_matmul is not differentiable and would drop the gradient of {name}: use "
            f"tritonfp8.functional.linear, or torch.no_grad(), or pass {name}.detach()"
        )


def scaled_matmul(
    a: Quantized,
    b: Quantized,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    accumulation: str = "precise",
) -> Tensor:
    """``activation(a @ b.T + bias) + residual`` on quantized operands, computed in float32 and rounded once.

    Args:
        a: ``[M, K]``.
        b: ``[N, K]``: both operands are K-major.
        bias: ``[N]``, floating.
        activation: None, ``"relu"``, ``"gelu"`` (exact, by erf) or ``"silu"``.
        residual: ``[M, N]``, floating, added after the activation.
        out_dtype: bfloat16, float16 or float32.
        accumulation: ``"precise"`` promotes the tensor core's sums to float32 at least every 128 of K; ``"fast"``
        leaves
            the whole K to the tensor core, which loses precision with K and much of it on data of one sign. Operands
            scaled along K are always promoted.

    Returns:
        ``[M, N]`` in ``out_dtype``.

    Raises:
        TypeError: an operand is not Quantized.
        ValueError: shapes, devices or specs that do not go together, an unknown option, or a ``bias`` or ``residual``
        that
            requires grad (this function is not differentiable).
    """
    _check_quantized("a", a)
    _check_quantized("b", b)
    require("activation", activation, (None, *ACTIVATIONS))
    require("accumulation", accumulation, ACCUMULATIONS)
    require("out_dtype", out_dtype, HIGH_PRECISION_DTYPES)
    matmul_family(a.spec.block, b.spec.block)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"scaled_matmul needs a [M, K] and b [N, K]; got {tuple(a.shape)} and {tuple(b.shape)}")
    if a.device != b.device:
        raise ValueError(f"both operands must be on one device; got a on {a.device} and b on {b.device}")
    shape = (a.shape[0], b.shape[0])
    _check_operand("bias", bias, shape[1:], a.device)
    _check_operand("residual", residual, shape, a.device)
    return ops.scaled_matmul(
        a.qdata, a.scale, *a.spec.args[:3], b.qdata, b.scale, *b.spec.args[:3],
        bias, activation, residual, out_dtype, accumulation,
    )  # fmt: skip


_Pair = tuple[Tensor | None, Tensor | None]


def _quantize_for(x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> tuple[_Pair, _Pair]:
    """``(qdata, scale)`` of ``x`` and of ``x.T``, each None where its spec is."""
    if spec is not None and spec_t is not None:
        qdata, scale, qdata_t, scale_t = ops.quantize_both(x, *spec.args, *spec_t.args)
        return (qdata, scale), (qdata_t, scale_t)
    none: _Pair = (None, None)
    return (
        none if spec is None else ops.quantize(x, *spec.args),
        none if spec_t is None else ops.quantize(x, *spec_t.args, True),
    )


def _matmul(gemm: Gemm, lhs: _Pair, rhs: _Pair, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    assert gemm.lhs is not None
    assert gemm.rhs is not None
    return ops.scaled_matmul(
        lhs[0], lhs[1], *gemm.lhs.args[:3], rhs[0], rhs[1], *gemm.rhs.args[:3],
        bias, None, None, out_dtype, gemm.accumulation,
    )  # fmt: skip


class _NoSecondDerivative(torch.autograd.Function):
    """Identity of a gradient; differentiating it is an error that says so."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            "a linear layer that follows a recipe has no second derivative: its gradients are rounded to 8 bits. "
            "Differentiate once, or use tritonfp8.revert(model), or the filter of tritonfp8.convert, for this layer."
        )


class _Linear(torch.autograd.Function):
    """``input [M, K] @ weight [N, K].T + bias`` by a recipe.

    Only the GEMMs whose result somebody needs are run, and only what they read is saved: ``input.T`` quantized for
    grad_weight (M K bytes and scales, in place of 2 M K bytes of bf16), or the input itself where the recipe keeps
    grad_weight in high precision; for grad_input the weight, which is alive anyway, or under autocast its cast.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe, needs: tuple[bool, bool]
    ) -> Tensor:
        needs_grad_input, needs_grad_weight = needs
        keep = recipe.grad_weight.rhs if needs_grad_weight else None
        quantized, kept = _quantize_for(input, recipe.output.lhs, keep)
        if recipe.output.rhs is not None:
            weight_pair = ops.quantize(weight, *recipe.output.rhs.args)
            out = _matmul(recipe.output, quantized, weight_pair, bias, input.dtype)
        else:
            out = ops.matmul(input, weight)
            if bias is not None:
                out = out + bias
        keep_input = needs_grad_weight and keep is None
        ctx.save_for_backward(weight if needs_grad_input else None, input if keep_input else None, *kept)
        ctx.recipe = recipe
        ctx.needs = (*needs, bias is not None and bias.requires_grad)
        ctx.dtypes = (input.dtype, weight.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        # Grad mode is on here when the caller asked for create_graph; compiled graphs refuse that by themselves.
        differentiable = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        with torch.no_grad():
            grads = _Linear._grads(ctx, grad_output)
        if differentiable:
            apply = _NoSecondDerivative.apply
            grads = tuple(
                g if g is None else apply(g.requires_grad_())  # type: ignore[no-untyped-call]
                for g in grads
            )
        return (*grads, None, None)

    @staticmethod
    def _grads(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        weight, input, input_qdata, input_scale = ctx.saved_tensors
        needs_grad_input, needs_grad_weight, needs_grad_bias = ctx.needs
        recipe: Recipe = ctx.recipe
        input_dtype, weight_dtype = ctx.dtypes
        grad_input = grad_weight = grad_bias = None
        pair, pair_t = _quantize_for(
            grad_output,
            recipe.grad_input.lhs if needs_grad_input else None,
            recipe.grad_weight.lhs if needs_grad_weight else None,
        )
        if needs_grad_input:
            if recipe.grad_input.rhs is not None:
                weight_pair = ops.quantize(weight, *recipe.grad_input.rhs.args, True)
                grad_input = _matmul(recipe.grad_input, pair, weight_pair, None, input_dtype)
            else:
                grad_input = ops.matmul(grad_output, weight.t())
        if needs_grad_weight:
            if recipe.grad_weight.rhs is not None:
                grad_weight = _matmul(recipe.grad_weight, pair_t, (input_qdata, input_scale), None, weight_dtype)
            else:
                grad_weight = ops.matmul(grad_output.t(), input.t())
        if needs_grad_bias:
            grad_bias = grad_output.sum(0)
        return grad_input, grad_weight, grad_bias


def _autocast(device: str, *tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors in autocast's dtype, where it is on: what ``F.linear`` would compute in."""
    # Autocast does not know the meta device, on which shapes are tried out.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [x if x is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors]


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, recipe: str | Recipe = "rowwise") -> Tensor:
    """``input @ weight.T + bias``, its three GEMMs by ``recipe``; differentiable once, composes with ``torch.compile``.

    Args:
        input: ``[..., K]``; any leading dims, empty ones too.
        weight: ``[N, K]``, in the dtype of ``input`` (or any where autocast is on, which casts as ``F.linear`` does).
        bias: ``[N]`` or None.
        recipe: a name or a :class:`~tritonfp8.Recipe`.

    Returns:
        ``[..., N]`` in the dtype of ``input`` (autocast's where it is on).

    Saved for backward, a layer: ``input.T`` quantized, M K bytes and scales (rowwise 4 K bytes, blockwise M K / 32,
    mxfp8 M K / 32), or the input itself, 2 M K bytes in bf16, where the recipe computes grad_weight in high precision.
    Nothing of the input is saved if the weight needs no grad. The weight is kept for grad_input as it is; where
    autocast casts it, that is a copy of 2 N K bytes, as in ``F.linear``.

    Raises:
        TypeError: a dtype other than bfloat16, float16 or float32, or dtypes that differ.
        ValueError: shapes that do not go together, or an unknown recipe.
        RuntimeError: when a gradient of the gradient is asked for.
    """
    recipe = get(recipe)
    cast_input, cast_weight, cast_bias = _autocast(input.device.type, input, weight, bias)
    assert cast_input is not None
    assert cast_weight is not None
    for name, x in (("input", cast_input), ("weight", cast_weight), ("bias", cast_bias)):
        if x is not None and (x.dtype not in HIGH_PRECISION_DTYPES or x.dtype != cast_input.dtype):
            raise TypeError(
                f"linear needs input, weight and bias of one dtype among bfloat16, float16 and float32; got {name} of "
                f"{x.dtype} with input of {cast_input.dtype}. Cast one, or use torch.autocast."
            )
    if weight.ndim != 2 or input.ndim == 0 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear needs input [..., K] and weight [N, K]; got {tuple(input.shape)} and {tuple(weight.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias must have shape ({weight.shape[0]},); got {tuple(bias.shape)}")
    rows = torch.atleast_2d(cast_input).flatten(0, -2) if input.ndim != 2 else cast_input
    grad = torch.is_grad_enabled()
    needs = (grad and cast_input.requires_grad, grad and cast_weight.requires_grad)
    out: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        rows, cast_weight, cast_bias, recipe, needs
    )
    return out if input.ndim == 2 else out.reshape(*input.shape[:-1], weight.shape[0])
