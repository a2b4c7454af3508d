"""Where the GEMMs of a layer get the operands of its weight: ``[N, K]``, or ``[E, N, K]`` of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.compat import torch_private
from tritonfp8.layers.extensions import SOURCES
from tritonfp8.layers.linear.operands import NO_PAIR, Later, Pair, Specs, quantize_for, quantize_later, quantize_now
from tritonfp8.ops.passes import may_batch
from tritonfp8.recipes import Recipe, get
from tritonfp8.specs import EXPANDED, TENSORWISE, QuantSpec
from tritonfp8.specs.checks import check_floating, require_flag, shown
from tritonfp8.specs.quantized import Quantized

Operands = tuple[Quantized | None, Quantized | None]
"""A matrix as two GEMMs read it: quantized untransposed and quantized transposed; None where no GEMM reads it."""


@dataclass(frozen=True)
class WeightSource:
    """Quantizes a weight for its GEMMs. This one casts the values of a tensor that is whole.

    Weights that have codes are read by :class:`CodesSource`; ``tritonfp8.distributed`` derives one for shards. Sources
    are compared by value, because a compiled graph is guarded on them. A spec of None means that no GEMM reads the
    weight in that orientation; its pair is ``(None, None)``.
    """

    @property
    def has_codes(self) -> bool:
        """Whether the weight is quantized already, so that nobody needs to keep its codes for several passes."""
        return False

    def values(self, weight: Tensor) -> Tensor:
        """The values that are quantized, or that a GEMM in high precision reads."""
        return weight

    def now(self, weight: Tensor, specs: Specs) -> tuple[Pair, Tensor | None]:
        """The weight for ``output``; runs in forward.

        Returns:
            ``(qdata, scale)``; and the amaxes of the transpose, which backward passes to :meth:`later`. They are None
            where backward finds them.
        """
        spec, spec_t, codes = specs
        if weight.ndim == 3:
            finds = weight.is_contiguous()
        else:
            # In a graph the casts of small weights to their transposes become one op, which finds the amaxes.
            is_recorded = torch.compiler.is_compiling() or torch_private.proxy_mode() is not None
            finds = not is_recorded or not may_batch(weight) or (spec and spec.block) == TENSORWISE
        return quantize_now(weight.detach(), spec, spec_t if finds else None, codes)

    def later(self, weight: Tensor, how: Later, grad_output: Tensor | None) -> Pair:
        """``(qdata, scale)`` of the transposed weight for ``grad_input``; runs in backward.

        ``grad_output`` is there for compilers only: an op that reads it cannot be moved into forward.
        """
        return quantize_later(weight, how)

    def both(self, weight: Tensor, specs: Specs) -> tuple[Pair, Pair]:
        """The weight as :meth:`now` and :meth:`later` return it, for more than one pass."""
        return quantize_for(weight.detach(), *specs)


@dataclass(frozen=True)
class RoundedWeight(WeightSource):
    """Rounds a weight to a format of fewer bits; another source casts the rounded values.

    Backward rounds the weight again, to the same values, so nothing more is saved for it.

    Attributes:
        spec: of the format.
        source: of weights that have values, whole or shards. Blocks of ``spec`` are whole in a shard, or its values
            are rounded already.
    """

    spec: QuantSpec
    source: WeightSource

    def values(self, weight: Tensor) -> Tensor:
        """See :func:`rounded`."""
        return rounded(weight.detach(), self.spec)

    def now(self, weight: Tensor, specs: Specs) -> tuple[Pair, Tensor | None]:
        """See :class:`WeightSource`."""
        return self.source.now(self.values(weight), specs)

    def later(self, weight: Tensor, how: Later, grad_output: Tensor | None) -> Pair:
        """See :class:`WeightSource`.

        The view makes it another computation in a graph, which otherwise would save the results of forward's.
        """
        values = self.values(weight[None])[0] if torch.compiler.is_compiling() else self.values(weight)
        return self.source.later(values, how, grad_output)

    def both(self, weight: Tensor, specs: Specs) -> tuple[Pair, Pair]:
        """See :class:`WeightSource`."""
        return self.source.both(self.values(weight), specs)


def rounded(x: Tensor, spec: QuantSpec, amax: Tensor | None = None) -> Tensor:
    """``x [..., K]`` rounded to the values of MXFP4, in the dtype of ``x``; ``amax``: see ``reference.quantize``.

    This is exact in bfloat16 and float32, and in float16: a value has two significant bits, a block has no value beyond
    its amax, and rounding a multiple of the smallest float16 gives a multiple of it.
    """
    odd = x.shape[-1] % 2
    # A zero changes no amax, and fills the last byte.
    qdata, scale = ops.quantize(F.pad(x, (0, 1)) if odd else x, *spec.args, False, amax)
    values = ops.dequantize(qdata, scale, *spec.args, x.dtype)
    return values[..., :-1] if odd else values


@dataclass(frozen=True)
class CodesSource(WeightSource):
    """Reads the operands of a weight that has codes: stored in 8 bits, or gathered in 8 bits by FSDP2."""

    @property
    def has_codes(self) -> bool:
        """True."""
        return True

    def now(self, weight: Tensor, specs: Specs) -> tuple[Pair, Tensor | None]:
        """The codes and their scales.

        Raises:
            ValueError: the weight has the codes of another recipe.
        """
        assert specs.spec is not None
        return read_operand(weight, specs.spec, False), None

    def later(self, weight: Tensor, how: Later, grad_output: Tensor | None) -> Pair:
        """The transpose: of a stored weight quantized from its values, unless its blocks are square."""
        return read_operand(weight, how.spec_t, True, grad_output)

    def both(self, weight: Tensor, specs: Specs) -> tuple[Pair, Pair]:
        """As :meth:`now` and :meth:`later`."""
        spec, spec_t, _ = specs
        return (
            NO_PAIR if spec is None else read_operand(weight, spec, False),
            NO_PAIR if spec_t is None else read_operand(weight, spec_t, True),
        )


@dataclass(frozen=True)
class PackedSource(CodesSource):
    """Reads a stored weight, whose codes of 4 bits stay as they are for the GEMM that expands them.

    Of experts the layer expands them, where it knows which of them have tokens.
    """

    def now(self, weight: Tensor, specs: Specs) -> tuple[Pair, Tensor | None]:
        """See :class:`CodesSource`. The pair has codes of 4 bits if the weight does and ``specs`` say ``EXPANDED``.

        In place of amaxes come the scales that rows have when they are expanded.
        """
        if specs.spec == EXPANDED:
            is_traced = torch.compiler.is_compiling()
            # See read_operand.
            found = ops.packed_operand(weight.detach()) if is_traced else weight.packed_operand()  # type: ignore[attr-defined]
            if len(found) > 1:
                qdata, scale, row_scale = found
                return (qdata, scale), row_scale
        return super().now(weight, specs)


def read_operand(weight: Any, spec: QuantSpec, transposed: bool, grad_output: Tensor | None = None) -> Pair:
    """``(qdata, scale)`` of a weight that has codes, or of its transpose, quantized by ``spec``."""
    if torch.compiler.is_compiling():
        # A graph does not look into subclasses. This op dispatches to their read_operand when the graph is made.
        op = ops.matrices_operand if weight.ndim == 3 else ops.weight_operand
        qdata, scale = op(weight.detach(), *spec.args, transposed, grad_output)
        return qdata, scale
    found: Pair = weight.read_operand(spec, transposed)
    return found


CASTS = WeightSource()
"""The source of whole weights that have values."""


def source_of(weight: Tensor) -> WeightSource:
    """The source of a weight: the one that the table has for its type, else :data:`CASTS`."""
    return SOURCES.get(type(weight), CASTS)


def source_for(recipe: Recipe, weight: Tensor, source: WeightSource) -> WeightSource:
    """``source`` of a weight, for a recipe that may round weights before it quantizes them.

    Raises:
        ValueError: the recipe rounds weights, and the weight has codes of another format.
    """
    if recipe.weights is None:
        return source
    if not source.has_codes:
        return RoundedWeight(recipe.weights, source)
    # Dynamo cannot read it; convert and swap_recipe check it for layers.
    known = recipe.weights if torch.compiler.is_compiling() else getattr(weight, "spec", recipe.weights)
    if known != recipe.weights:
        raise ValueError(
            f"recipe {recipe.name!r} reads weights that are rounded to {recipe.weights}, and this weight has codes of "
            f"{known}: convert the model again from high precision, and swap recipes of gathered weights between steps"
        )
    return source


def _quantized(pairs: tuple[Pair, Pair], specs: Sequence[QuantSpec | None]) -> Operands:
    first, second = (
        None if spec is None or pair[0] is None or pair[1] is None else Quantized(pair[0], pair[1], spec)
        for pair, spec in zip(pairs, specs, strict=True)
    )
    return first, second


def pair_of(q: Quantized | None) -> Pair:
    """``(qdata, scale)`` of ``q``; ``(None, None)`` if ``q`` is None."""
    return NO_PAIR if q is None else (q.qdata, q.scale)


def serves_both(recipe: Recipe) -> bool:
    """Whether the transpose of the operand of ``output`` serves ``grad_input``: square blocks of one spec."""
    spec = recipe.output.rhs
    return spec is not None and spec == recipe.grad_input.rhs and spec.block[0] == spec.block[1]


def quantize_weight(weight: Tensor, recipe: str | Recipe, needs_grad_input: bool = True) -> Operands:
    """``weight [N, K]`` as the GEMMs of ``recipe`` read it, for :func:`linear` to use more than once.

    Returns:
        The weight for ``output``, and its transpose for ``grad_input``. The second is None if that GEMM is not needed
        or keeps its operands in high precision. It is also None for square blocks, whose transpose is exact: one copy
        of N K bytes then serves both.

    Raises:
        TypeError: ``weight`` is no floating tensor, or an argument is of another type.
        ValueError: ``weight`` has not two dims, or an unknown recipe.
    """
    check_floating("weight", weight)
    require_flag("needs_grad_input", needs_grad_input)
    if weight.ndim != 2:
        raise ValueError(f"weight must be [N, K]; got shape {tuple(weight.shape)}")
    return weight_operands(weight, get(recipe), needs_grad_input, CASTS)


def weight_operands(weight: Tensor, recipe: Recipe, needs_grad_input: bool, source: WeightSource) -> Operands:
    """:func:`quantize_weight` of the part of a weight that ``source`` quantizes on this rank."""
    transposed = None if serves_both(recipe) or not needs_grad_input else recipe.grad_input.rhs
    specs = (recipe.output.rhs, transposed)
    source = source_for(recipe, weight, source)
    return _quantized(source.both(weight, Specs(*specs, recipe.codes["weight"])), specs)


def check_cached(cached: Operands, weight: Tensor, recipe: Recipe, needs_grad_input: bool) -> None:
    """Raise unless ``cached`` is the result of :func:`quantize_weight` for a weight of this shape and this recipe."""
    if (
        not isinstance(cached, tuple | list)
        or [q for q in cached if not isinstance(q, Quantized | None)]
        or len(cached) != 2
    ):
        raise TypeError(
            f"quantized_weight must be what tritonfp8.functional.quantize_weight returns, or None; got {shown(cached)}"
        )
    wanted = (recipe.output.rhs, None if serves_both(recipe) or not needs_grad_input else recipe.grad_input.rhs)
    shapes = (tuple(weight.shape), tuple(weight.shape[::-1]))
    for name, q, spec, shape in zip(("weight", "weight.T"), cached, wanted, shapes, strict=True):
        if spec is None:
            continue
        if q is None and name == "weight.T":
            raise_without_transpose(recipe)
        came = "None" if q is None else f"{q.spec} of shape {tuple(q.shape)}"
        if q is None or q.spec != spec or tuple(q.shape) != shape:
            raise ValueError(
                f"quantized_weight must hold {name} as recipe {recipe.name!r} reads it, {spec} of shape {shape}; got "
                f"{came}. Use tritonfp8.functional.quantize_weight."
            )


def raise_without_transpose(recipe: Recipe) -> NoReturn:
    """Raise ValueError: operands of a weight that were quantized for inference are used to train."""
    raise ValueError(
        f"recipe {recipe.name!r} reads the transposed weight for the gradient of the input, and the weight was "
        "quantized for inference. If tritonfp8.quantize_weights_once was opened under torch.no_grad() or "
        "torch.inference_mode(), open it where gradients are enabled. Operands that you quantized yourself must have "
        "the transposed weight, too: functional.quantize_weight(weight, recipe, needs_grad_input=True)"
    )
