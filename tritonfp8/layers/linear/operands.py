"""Casts for the GEMMs of a linear layer, and the provider of the operands that depend on the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from tritonfp8 import ops
from tritonfp8.specs import ROWWISE, TENSORWISE, QuantSpec

Pair = tuple[Tensor | None, Tensor | None]
NO_PAIR: Pair = (None, None)
PairsAndSum = tuple[Pair, Pair, Tensor]
"""Both operands of a gradient, and the gradient of the bias."""
Amaxes = tuple[Tensor | None, Tensor | None]
"""float32 amaxes of the blocks of a matrix and of its transpose; None where each block lies on one rank."""


class Specs(NamedTuple):
    """How a matrix is quantized for the GEMMs that read it.

    Attributes:
        spec, spec_t: of the matrix and of its transpose; None where no GEMM reads it in that orientation.
        codes: of the codes that the transpose is made from; None to make it from values.
    """

    spec: QuantSpec | None
    spec_t: QuantSpec | None
    codes: QuantSpec | None = None


class Later(NamedTuple):
    """How backward quantizes the transpose of a matrix that forward quantized.

    Attributes:
        spec_t: of the transpose.
        amax_t: float32, the amaxes of its blocks; None where forward did not find them.
        codes: the spec of the codes that the transpose is made from; None to make it from values.
        scale: of these codes; None where nobody kept them, and the matrix is quantized again.
    """

    spec_t: QuantSpec
    amax_t: Tensor | None = None
    codes: QuantSpec | None = None
    scale: Tensor | None = None


def quantize_for(
    x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None, codes: QuantSpec | None = None
) -> tuple[Pair, Pair]:
    """``(qdata, scale)`` of ``x`` and of ``x.T``, each None where its spec is; ``x`` may be matrices ``[E, N, K]``.

    ``codes``: the spec of the codes of ``x`` that ``x.T`` is made from; None to make it from values.
    """
    matrices = x.ndim == 3
    first = codes if codes is not None and spec_t is not None else spec
    if first is not None and spec_t is not None and not matrices:
        # A default is left out: the dispatcher takes time for each argument.
        flags = () if codes is None else (True,)
        qdata, scale, qdata_t, scale_t = ops.quantize_both(x, *first.args, *spec_t.args, *flags)
        return NO_PAIR if spec is None else (qdata, scale), (qdata_t, scale_t)
    cast = ops.quantize_matrices if matrices else ops.quantize
    if codes is not None and spec_t is not None:
        pair = cast(x, *codes.args)
        return NO_PAIR if spec is None else pair, ops.transpose_codes(*pair, *codes.args, *spec_t.args)
    return (
        NO_PAIR if spec is None else cast(x, *spec.args),
        NO_PAIR if spec_t is None else cast(x, *spec_t.args, True),
    )


def found_together(spec: QuantSpec | None, spec_t: QuantSpec | None) -> bool:
    """Whether the pass that casts a matrix by ``spec`` finds the amaxes of its transpose by ``spec_t``, too."""
    if spec is None or spec_t is None:
        return False
    return spec.block == spec_t.block and spec.block in (TENSORWISE, ROWWISE)


def quantize_now(
    x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None, codes: QuantSpec | None = None
) -> tuple[Pair, Tensor | None]:
    """``(qdata, scale)`` of ``x``; and the amax of ``x.T`` for :func:`quantize_later`, if it is known then.

    ``x`` may be the matrices of experts, ``[E, N, K]``. ``codes``: ``x.T`` will be made from codes.
    """
    if spec is None:
        return NO_PAIR, None
    matrices = x.ndim == 3
    if spec_t is None or not found_together(spec, spec_t):
        return (ops.quantize_matrices if matrices else ops.quantize)(x, *spec.args), None
    cast = ops.quantize_matrices_with_amax if matrices else ops.quantize_with_amax
    qdata, scale, amax = cast(x, *spec.args, *spec_t.args, *(() if codes is None else (True,)))
    return (qdata, scale), amax


def quantize_later(x: Tensor, how: Later) -> Pair:
    """``(qdata, scale)`` of ``x.T``, by the amax that :func:`quantize_now` returned."""
    spec_t, amax_t, codes, scale = how
    amax = () if amax_t is None else (amax_t,)
    if codes is not None and scale is not None:
        return ops.transpose_codes(x, scale, *codes.args, *spec_t.args, *amax)
    if codes is not None:
        return quantize_for(x, None, spec_t, codes)[1]
    cast = ops.quantize_matrices if x.ndim == 3 else ops.quantize
    return cast(x, *spec_t.args, True, *amax)


@dataclass(frozen=True)
class OperandProvider:
    """How the GEMMs of one linear layer get the operands of its input and of the gradient of its output.

    This one quantizes each by itself; ``tritonfp8.distributed`` derives one for tensors that are shards. Providers are
    compared by value, because a compiled graph is guarded on them. The operands of the weight come from a
    :class:`~.weight_source.WeightSource`.

    A spec of None means that no GEMM reads the operand in that orientation; its pair is ``(None, None)``.
    """

    @property
    def input_key(self) -> object:
        """Sibling layers share the cast of an input only if this value is equal for both."""
        return None

    def input(self, x: Tensor, specs: Specs) -> tuple[Pair, Pair]:
        """``(qdata, scale)`` of the input ``x [M, K]`` for ``output``, and of ``x.T`` for ``grad_weight``."""
        return quantize_for(x, *specs)

    def input_now(self, x: Tensor, specs: Specs) -> tuple[Pair, Tensor | None]:
        """The input for ``output``, where backward casts it again for ``grad_weight``.

        Returns:
            ``(qdata, scale)``; and the amaxes of ``x.T`` if they are known, which backward passes to
            :meth:`input_later`.
        """
        return quantize_now(x, *specs)

    def input_later(self, x: Tensor, how: Later) -> Pair:
        """``(qdata, scale)`` of ``x.T`` for ``grad_weight``; runs in backward."""
        return quantize_later(x, how)

    def output(self, out: Tensor) -> Tensor:
        """What the layer returns of ``out [M, N]``, its GEMM's result; the gradient comes in the shape of this."""
        return out

    def grad_output(self, x: Tensor, specs: Specs) -> tuple[Pair, Pair]:
        """``(qdata, scale)`` of ``x [M, N]`` for ``grad_input``, and of ``x.T`` for ``grad_weight``."""
        return quantize_for(x, *specs)

    def grad_output_and_sum(self, x: Tensor, specs: Specs) -> PairsAndSum:
        """As :meth:`grad_output`, and the gradient of a bias ``[N]``: the sum of the rows of ``x [M, N]``."""
        spec, spec_t, codes = specs
        if spec is None or spec_t is None:
            return *quantize_for(x, *specs), x.sum(0)
        flags = () if codes is None else (True,)
        qdata, scale, qdata_t, scale_t, total = ops.quantize_both_sum(x, *spec.args, *spec_t.args, *flags)
        return (qdata, scale), (qdata_t, scale_t), total


LOCAL = OperandProvider()
"""The provider of layers whose operands are whole tensors on this rank."""
