"""How the GEMMs of a recipe read a weight, and which bytes of it they need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tritonfp8.layers.linear import serves_both
from tritonfp8.recipes import Recipe
from tritonfp8.specs import QuantSpec, transposed
from tritonfp8.specs.formats import SCALE_FORMATS


@dataclass(frozen=True)
class WeightOrientation:
    """How a GEMM reads a matrix ``[N, K]``: quantized untransposed, or transposed as ``[K, N]``.

    Attributes:
        spec: of the operand.
        transposed: whether it is the transpose.
        spec_t: of the transpose that is made from the codes of this one; None if none is.
        weights: see :class:`~tritonfp8.Recipe`; each rank rounds its shard.
    """

    spec: QuantSpec
    transposed: bool
    spec_t: QuantSpec | None = None
    weights: QuantSpec | None = None

    @cached_property
    def block(self) -> tuple[int, int]:
        """The block in the coordinates of the untransposed weight."""
        return transposed(self.spec.block) if self.transposed else self.spec.block

    @cached_property
    def sends_scales(self) -> bool:
        """Whether scales of a shard of rows travel in its rank segment.

        Scales of one byte for a few elements (MX) do: their amaxes, in float32, would be too many to reduce. Each rank
        computes all other scales from the reduced amaxes.
        """
        return SCALE_FORMATS[self.spec.scale_format].exponent_only

    def shape(self, rows: int, cols: int) -> tuple[int, int]:
        """The shape in which a part ``[rows, cols]`` of the untransposed weight is sent."""
        return (cols, rows) if self.transposed else (rows, cols)


def weight_orientations(recipe: Recipe) -> tuple[WeightOrientation, ...]:
    """The orientations of a weight that are sent for ``output`` and ``grad_input``: one if one serves both, else two.

    None in high precision, nor where only one of the two GEMMs is quantized: the other needs the values anyway.
    """
    output, grad_input, weights = recipe.output.rhs, recipe.grad_input.rhs, recipe.weights
    if output is None or grad_input is None:
        return ()
    if serves_both(recipe):
        return (WeightOrientation(output, False, None, weights),)
    if recipe.transposed_from == "codes":
        return (WeightOrientation(output, False, grad_input, weights),)
    return WeightOrientation(output, False, None, weights), WeightOrientation(grad_input, True, None, weights)
