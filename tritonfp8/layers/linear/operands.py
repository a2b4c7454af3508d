"""What the three GEMMs of a linear layer read: a matrix quantized as it lies, transposed, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tritonfp8 import ops
from tritonfp8.quantized import Quantized
from tritonfp8.recipes import Recipe, get
from tritonfp8.specs import QuantSpec, check_floating, require_flag, shown

Pair = tuple[Tensor | None, Tensor | None]
NO_PAIR: Pair = (None, None)
Amaxes = tuple[Tensor | None, Tensor | None]
"""Of the blocks of a matrix and of those of its transpose, float32; None where each block is whole here."""
Operands = tuple[Quantized | None, Quantized | None]
"""A matrix as two GEMMs read it, quantized as it lies and quantized transposed; None where no GEMM does."""


def quantize_for(x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> tuple[Pair, Pair]:
    """``(qdata, scale)`` of ``x`` and of ``x.T``, each None where its spec is."""
    if spec is not None and spec_t is not None:
        qdata, scale, qdata_t, scale_t = ops.quantize_both(x, *spec.args, *spec_t.args)
        return (qdata, scale), (qdata_t, scale_t)
    return (
        NO_PAIR if spec is None else ops.quantize(x, *spec.args),
        NO_PAIR if spec_t is None else ops.quantize(x, *spec_t.args, True),
    )


@dataclass(frozen=True)
class Quantizer:
    """How the operands of one layer are quantized: here, each by itself. Operands that are shards need a derived one.

    Compared by value: a compiled graph is guarded on it.
    """

    def amaxes(self, operand: str, x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> Amaxes:
        """What other ranks say about the blocks of ``x``, in one collective for both orientations."""
        return None, None

    # Not __call__: of an object that a graph makes and calls, torch 2.11 asks for the hash before it has its fields.
    def quantize(
        self,
        operand: str,
        x: Tensor,
        spec: QuantSpec | None,
        spec_t: QuantSpec | None,
        amaxes: Amaxes | None = None,
    ) -> tuple[Pair, Pair]:
        """``(qdata, scale)`` of ``x`` and of ``x.T``, each ``(None, None)`` where its spec is None.

        ``operand`` is ``"input"``, ``"weight"`` or ``"grad_output"``; ``x`` is a matrix. ``amaxes`` are those that
        :meth:`amaxes` found, or None to find them now.
        """
        return quantize_for(x, spec, spec_t)


WHOLE = Quantizer()
"""Of operands that are no shards."""


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


def weight_operand(
    weight: QuantizedWeight, recipe: Recipe, transposed: bool, grad_output: Tensor | None = None
) -> Pair:
    """``(qdata, scale)`` of a weight that comes quantized; see :meth:`QuantizedWeight.operand`."""
    # Static, and of the class: a graph takes the methods of an object that is a tensor for torch's.
    return pair_of(type(weight).operand(weight, recipe, transposed, grad_output))


def serves_both(recipe: Recipe) -> bool:
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
    transposed = None if serves_both(recipe) or not needs_grad_input else recipe.grad_input.rhs
    specs = (recipe.output.rhs, transposed)
    return _quantized(quantize_for(weight.detach(), *specs), specs)


def check_held(held: Operands, weight: Tensor, recipe: Recipe, needs_grad_input: bool) -> None:
    """Raise unless ``held`` is what :func:`quantize_weight` gives for this weight's shape and this recipe."""
    if not isinstance(held, tuple | list) or [q for q in held if not isinstance(q, Quantized | None)] or len(held) != 2:
        raise TypeError(
            f"quantized_weight must be what tritonfp8.functional.quantize_weight returns, or None; got {shown(held)}"
        )
    wanted = (recipe.output.rhs, None if serves_both(recipe) or not needs_grad_input else recipe.grad_input.rhs)
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
