"""What the three GEMMs of a linear layer read: a matrix quantized as it lies, transposed, or both."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tritonfp8 import ops
from tritonfp8.quantized import Quantized
from tritonfp8.specs import QuantSpec

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
