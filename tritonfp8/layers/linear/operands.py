"""The quantized operands of a linear layer's GEMMs, and the provider that a layer gets them from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.checks import check_floating, require_flag, shown
from tritonfp8.layers.extensions import PROVIDERS
from tritonfp8.ops.passes import may_batch
from tritonfp8.quantized import Quantized
from tritonfp8.recipes import Recipe, get
from tritonfp8.specs import ROWWISE, TENSORWISE, QuantSpec

Pair = tuple[Tensor | None, Tensor | None]
NO_PAIR: Pair = (None, None)
PairsAndSum = tuple[Pair, Pair, Tensor]
"""Both operands of a gradient, and the gradient of the bias."""
Amaxes = tuple[Tensor | None, Tensor | None]
"""float32 amaxes of the blocks of a matrix and of its transpose; None where each block lies on this rank alone."""
Operands = tuple[Quantized | None, Quantized | None]
"""A matrix as two GEMMs read it: quantized untransposed and quantized transposed; None where no GEMM reads it."""


def quantize_for(x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> tuple[Pair, Pair]:
    """``(qdata, scale)`` of ``x`` and of ``x.T``, each None where its spec is."""
    if spec is not None and spec_t is not None:
        qdata, scale, qdata_t, scale_t = ops.quantize_both(x, *spec.args, *spec_t.args)
        return (qdata, scale), (qdata_t, scale_t)
    return (
        NO_PAIR if spec is None else ops.quantize(x, *spec.args),
        NO_PAIR if spec_t is None else ops.quantize(x, *spec_t.args, True),
    )


def found_together(spec: QuantSpec | None, spec_t: QuantSpec | None) -> bool:
    """Whether the pass that casts a matrix by ``spec`` finds the amaxes of its transpose by ``spec_t``, too."""
    if spec is None or spec_t is None:
        return False
    return spec.block == spec_t.block and spec.block in (TENSORWISE, ROWWISE)


def quantize_now(x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> tuple[Pair, Tensor | None]:
    """``(qdata, scale)`` of ``x``; and the amax of ``x.T`` for :func:`quantize_later`, if it is known then."""
    if spec is None:
        return NO_PAIR, None
    if spec_t is None or not found_together(spec, spec_t):
        return ops.quantize(x, *spec.args), None
    qdata, scale, amax = ops.quantize_with_amax(x, *spec.args, *spec_t.args)
    return (qdata, scale), amax


def quantize_later(x: Tensor, spec_t: QuantSpec, amax_t: Tensor | None) -> Pair:
    """``(qdata, scale)`` of ``x.T`` by the amax that :func:`quantize_now` returned."""
    return ops.quantize(x, *spec_t.args, True, *(() if amax_t is None else (amax_t,)))


@dataclass(frozen=True)
class OperandProvider:
    """How the GEMMs of one linear layer get their operands. This one quantizes each operand here, by itself.

    ``tritonfp8.distributed`` derives providers for operands that are shards and for weights that FSDP2 gathered in
    8 bits. Providers are compared by value, because a compiled graph is guarded on them.

    A spec of None means that no GEMM reads the operand in that orientation; its pair is ``(None, None)``.
    """

    @property
    def input_key(self) -> object:
        """Sibling layers share the cast of an input only if this value is equal for both."""
        return None

    @property
    def weight_has_codes(self) -> bool:
        """Whether the weight is quantized already, so that nobody needs to keep its codes for several passes."""
        return False

    def input(self, x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> tuple[Pair, Pair]:
        """``(qdata, scale)`` of the input ``x [M, K]`` for ``output``, and of ``x.T`` for ``grad_weight``."""
        return quantize_for(x, spec, spec_t)

    def input_now(self, x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> tuple[Pair, Tensor | None]:
        """The input for ``output``, where backward casts it again for ``grad_weight``.

        Returns:
            ``(qdata, scale)``; and the amaxes of ``x.T`` if they are known, which backward passes to
            :meth:`input_later`.
        """
        return quantize_now(x, spec, spec_t)

    def input_later(self, x: Tensor, spec_t: QuantSpec, amax_t: Tensor | None) -> Pair:
        """``(qdata, scale)`` of ``x.T`` for ``grad_weight``; runs in backward."""
        return quantize_later(x, spec_t, amax_t)

    def weight(self, weight: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> tuple[Pair, Tensor | None]:
        """The weight ``[N, K]`` for ``output``; runs in forward.

        Returns:
            ``(qdata, scale)``; and the amaxes of ``weight.T``, which backward passes to :meth:`weight_t`. They are
            None where backward finds them.
        """
        # In a graph the casts of small weights to their transposes become one op, which finds the amaxes.
        alone = not torch.compiler.is_compiling() or not may_batch(weight) or (spec and spec.block) == TENSORWISE
        return quantize_now(weight.detach(), spec, spec_t if alone else None)

    def weight_both(self, weight: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> tuple[Pair, Pair]:
        """The weight ``[N, K]`` as :meth:`weight` and :meth:`weight_t` return it, for more than one pass."""
        return quantize_for(weight.detach(), spec, spec_t)

    def weight_t(self, weight: Tensor, spec_t: QuantSpec, amax_t: Tensor | None, grad_output: Tensor) -> Pair:
        """``(qdata, scale)`` of ``weight.T [K, N]`` for ``grad_input``; runs in backward.

        ``grad_output`` is there for compilers only: an op that reads it cannot be moved into forward.
        """
        return quantize_later(weight, spec_t, amax_t)

    def grad_output(self, x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> tuple[Pair, Pair]:
        """``(qdata, scale)`` of ``x [M, N]`` for ``grad_input``, and of ``x.T`` for ``grad_weight``."""
        return quantize_for(x, spec, spec_t)

    def grad_output_and_sum(self, x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> PairsAndSum:
        """As :meth:`grad_output`, and the gradient of a bias ``[N]``: the sum of the rows of ``x [M, N]``."""
        if spec is None or spec_t is None:
            return *quantize_for(x, spec, spec_t), x.sum(0)
        qdata, scale, qdata_t, scale_t, total = ops.quantize_both_sum(x, *spec.args, *spec_t.args)
        return (qdata, scale), (qdata_t, scale_t), total


@dataclass(frozen=True)
class OperandsOfOthers(OperandProvider):
    """Gets the operands of the input and of ``grad_output`` from another provider. A derived class has the weight's.

    Attributes:
        others: that provider. It has no default: torch 2.11 cannot trace one.
    """

    others: OperandProvider

    @property
    def input_key(self) -> object:
        """The weight does not change how an input is cast."""
        return self.others.input_key

    def input(self, x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> tuple[Pair, Pair]:
        """See ``others``."""
        return self.others.input(x, spec, spec_t)

    def input_now(self, x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> tuple[Pair, Tensor | None]:
        """See ``others``."""
        return self.others.input_now(x, spec, spec_t)

    def input_later(self, x: Tensor, spec_t: QuantSpec, amax_t: Tensor | None) -> Pair:
        """See ``others``."""
        return self.others.input_later(x, spec_t, amax_t)

    def grad_output(self, x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> tuple[Pair, Pair]:
        """See ``others``."""
        return self.others.grad_output(x, spec, spec_t)

    def grad_output_and_sum(self, x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> PairsAndSum:
        """See ``others``."""
        return self.others.grad_output_and_sum(x, spec, spec_t)


LOCAL = OperandProvider()
"""The provider of layers whose operands are whole tensors on this rank."""


def provider_of(weight: Tensor) -> OperandProvider:
    """The provider of a layer with this weight: the one that the table has for its type, else :data:`LOCAL`."""
    return PROVIDERS.get(type(weight), LOCAL)


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
    return weight_operands(weight, get(recipe), needs_grad_input, LOCAL)


def weight_operands(weight: Tensor, recipe: Recipe, needs_grad_input: bool, provider: OperandProvider) -> Operands:
    """:func:`quantize_weight` of the part of a weight that ``provider`` quantizes on this rank."""
    transposed = None if serves_both(recipe) or not needs_grad_input else recipe.grad_input.rhs
    specs = (recipe.output.rhs, transposed)
    return _quantized(provider.weight_both(weight, *specs), specs)


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
