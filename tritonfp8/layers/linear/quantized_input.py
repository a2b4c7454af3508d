"""An input that is quantized before it reaches its linear layers, and a linear layer that reads it.

An 8-bit tensor has no gradient. So a producer hands its linears a :class:`QuantizedInput`: the quantized tensor in both
orientations, and a handle of its shape that carries the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tritonfp8 import counting
from tritonfp8.checks import check_strided, require_type
from tritonfp8.compat.torch_private import is_transformed
from tritonfp8.formats import HIGH_PRECISION_DTYPES
from tritonfp8.layers.linear.checks import autocast_all, check_linear
from tritonfp8.layers.linear.function import LinearPlan, apply_linear
from tritonfp8.layers.linear.operands import NO_PAIR, Operands, pair_of, provider_of, quantize_for
from tritonfp8.layers.recompute import decided
from tritonfp8.layers.unsupported import refuse_transform
from tritonfp8.ops import sealed
from tritonfp8.quantized import Quantized
from tritonfp8.recipes import Recipe, get
from tritonfp8.specs import QuantSpec


def check_untransformed() -> None:
    """Raise RuntimeError inside a transform of ``torch.func``, which cannot follow a tensor in 8 bits."""
    if not torch.compiler.is_compiling() and is_transformed():
        refuse_transform("a fused layer", "Convert without fuse=True")


def is_fusable(recipe: str | Recipe) -> bool:
    """Whether all three GEMMs of a recipe are quantized, so that nothing reads their input in high precision."""
    return get(recipe).quantized_share == 1


def input_specs(recipe: Recipe) -> tuple[QuantSpec, QuantSpec]:
    """The specs of a layer's input: as ``output`` reads it, and transposed as ``grad_weight`` reads it."""
    spec, spec_t = recipe.output.lhs, recipe.grad_weight.rhs
    if spec is None or spec_t is None or recipe.grad_input.lhs is None:
        raise ValueError(
            f"a fused layer needs a recipe whose three GEMMs are quantized; {recipe.name!r} keeps one in high "
            "precision. Use another recipe, or convert without fuse=True."
        )
    return spec, spec_t


@dataclass(frozen=True, eq=False)
class QuantizedInput:
    """The input of one or more linears, quantized once: a fused norm returns it in place of a tensor.

    A pytree node. ``shape``, ``dtype``, ``device`` and ``ndim`` are those of the tensor that it replaces.

    Attributes:
        handle: ``[..., K]`` without contents of its own: it carries the gradient and the shape.
        normal: the tensor folded to ``[M, K]``, quantized for ``output``.
        transposed: its transpose ``[K, M]``, quantized for ``grad_weight``; None where gradients are off.
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
        """Number of dims of the tensor that this replaces."""
        return self.handle.ndim

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the tensor was rounded to before it was quantized; the linears return it, too."""
        return self.handle.dtype

    @property
    def device(self) -> torch.device:
        """The device of the data."""
        return self.handle.device


pytree.register_pytree_node(
    QuantizedInput,
    lambda x: ([x.handle, x.normal, x.transposed], None),
    lambda children, _: QuantizedInput(*children),
    serialized_type_name="tritonfp8.QuantizedInput",
)


def handle_of(x: Tensor) -> Tensor:
    """A tensor of the shape of ``x`` that takes no memory: it carries the gradient of an input in 8 bits."""
    return x.new_empty(()).expand(x.shape)


class _QuantizeInput(torch.autograd.Function):
    """``x [M, K]`` quantized for its linears; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: QuantSpec, spec_t: QuantSpec | None) -> tuple[Tensor, ...]:
        pairs = quantize_for(x, spec, spec_t)
        quantized = [t for pair in pairs for t in pair if t is not None]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*quantized)
        return sealed(handle_of(x), x), *quantized

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *none: None) -> tuple[Tensor | None, ...]:
        return grad, None, None


def as_input(x: Tensor, results: tuple[Tensor, ...], spec: QuantSpec, spec_t: QuantSpec | None) -> QuantizedInput:
    """The :class:`QuantizedInput` of an autograd function's results: the handle, then data and scale, once or twice."""
    handle, *quantized = results
    transposed = None if spec_t is None else Quantized(quantized[2], quantized[3], spec_t)
    return QuantizedInput(handle.reshape(x.shape), Quantized(quantized[0], quantized[1], spec), transposed)


def folded(x: Tensor) -> Tensor:
    """``x [..., K]`` as ``[M, K]``."""
    return x if x.ndim == 2 else torch.atleast_2d(x).flatten(0, -2)


def check_input(x: Tensor) -> None:
    """Raise unless ``x`` is a dense tensor ``[..., K]`` of a dtype in which a layer may compute."""
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

    Its transpose is quantized, too, if gradients are recorded. Under autocast ``x`` is cast first, as by a linear.

    Raises:
        TypeError: a dtype other than bfloat16, float16 or float32.
        ValueError: a scalar, or a recipe that keeps one of the GEMMs in high precision.
    """
    check_untransformed()
    spec, spec_t = input_specs(get(recipe))
    require_type("the input", x, Tensor, "a torch.Tensor")
    (cast,) = autocast_all(x.device.type, x)
    assert cast is not None
    check_input(cast)
    kept = spec_t if torch.is_grad_enabled() else None
    results = _QuantizeInput.apply(folded(cast), spec, kept)  # type: ignore[no-untyped-call]
    return as_input(cast, results, spec, kept)


def check_reader(input: QuantizedInput, recipe: Recipe, needs_transposed: bool) -> None:
    """Raise ValueError unless ``input`` was quantized as the GEMMs of ``recipe`` read it."""
    check_untransformed()
    spec, spec_t = input_specs(recipe)
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


def check_tensors(**tensors: object) -> None:
    """Raise TypeError for the first argument that is no tensor."""
    for name, x in tensors.items():
        require_type(name, x, Tensor, "a torch.Tensor")


def is_distributed(x: Tensor | None) -> bool:
    """Whether ``x`` is a DTensor; does not import ``torch.distributed``."""
    return type(x).__module__.startswith("torch.distributed")


def check_whole(*weights: Tensor | None) -> None:
    """Raise TypeError if one of these weights is a distributed tensor, with which fused layers do not compute."""
    for weight in weights:
        if not torch.compiler.is_compiling() and is_distributed(weight):
            raise TypeError(
                f"fused layers compute with whole weights; got a {type(weight).__name__}. Call parallelize_module "
                "before tritonfp8.convert(model, recipe, fuse=True), which does not fuse sharded layers, or convert "
                "without fuse=True. FSDP2 gathers whole weights and works with fused layers."
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
        recipe: a name or a :class:`~tritonfp8.Recipe` whose three GEMMs are quantized.
        quantized_weight: as of :func:`tritonfp8.functional.linear`.

    Returns:
        ``[..., N]`` in the dtype of the input.

    Raises:
        TypeError: dtypes that differ, or a distributed tensor.
        ValueError: shapes or specs that do not fit together.
        RuntimeError: in a second derivative.
    """
    check_tensors(weight=weight)
    if bias is not None:
        check_tensors(bias=bias)
    require_type("input", input, QuantizedInput, "a QuantizedInput, as quantize_input and quantized_rms_norm return")
    recipe = decided(weight, get(recipe))
    check_whole(weight, bias)
    cast, cast_bias = autocast_all(input.device.type, weight, bias)
    assert cast is not None
    check_linear(input.handle, cast, cast_bias)
    grad = torch.is_grad_enabled()
    needs = (grad and input.handle.requires_grad, grad and cast.requires_grad)
    check_reader(input, recipe, needs[1])
    plan = LinearPlan(recipe, *needs, quantized_weight is not None, provider_of(cast), no_op_has_gradient=True)
    if counting.is_logging:
        plan = plan._replace(layer=counting.take_callers()[0])
    pairs = pair_of(input.normal), pair_of(input.transposed) if needs[1] else NO_PAIR
    out = apply_linear(folded(input.handle), pairs, cast, cast_bias, plan, quantized_weight)
    return out.reshape(*input.shape[:-1], cast.shape[0])
