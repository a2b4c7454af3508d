"""The operands of a linear layer whose input, weight and output are shards of global tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tritonfp8.distributed.global_scales import global_amax, quantize_by_amaxes
from tritonfp8.distributed.shard_layout import DimLayout
from tritonfp8.distributed.tensor_parallel.token_gather import TokenGather, quantize_and_gather
from tritonfp8.layers.linear import OperandProvider, Pair, PairsAndSum
from tritonfp8.specs import QuantSpec


@dataclass(frozen=True)
class ShardedOperands(OperandProvider):
    """Quantizes shards by the scales of the global tensors, and gathers an input whose tokens are sharded.

    Attributes:
        m, n, k: the layouts of the tokens, the out features and the in features, as the scales see them.
        gather: how the input's tokens are gathered in 8 bits; None if they are not.
        gathered_k: the layout of the in features of a gathered input, whose scales are always the global ones.
    """

    m: DimLayout
    n: DimLayout
    k: DimLayout
    gather: TokenGather | None
    gathered_k: DimLayout

    @property
    def input_key(self) -> object:
        """Sibling layers differ in their out features, which the cast of an input does not depend on."""
        return (self.m, self.k) if self.gather is None else (self.gather, self.gathered_k)

    def input(self, x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> tuple[Pair, Pair]:
        """``x`` is this rank's part; with a gather, the operands have the tokens of all ranks."""
        if self.gather is not None:
            return quantize_and_gather(x, spec, spec_t, self.gather, self.gathered_k)
        return quantize_by_amaxes(x, spec, spec_t, global_amax(x, spec, spec_t, (self.m, self.k)))

    def input_now(self, x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> tuple[Pair, Tensor | None]:
        """As :meth:`input`; backward reduces its own amaxes."""
        return self.input(x, spec, None)[0], None

    def input_later(self, x: Tensor, spec_t: QuantSpec, amax_t: Tensor | None) -> Pair:
        """As :meth:`input`."""
        return self.input(x, None, spec_t)[1]

    def weight(self, weight: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> tuple[Pair, Tensor | None]:
        """Reduces the amaxes of both orientations in one collective.

        The reduction runs in forward. In backward it would depend only on the weight, so the partitioner of each rank
        could place the collective in a different graph, and the ranks would deadlock.
        """
        amax, amax_t = global_amax(weight.detach(), spec, spec_t, (self.n, self.k))
        return quantize_by_amaxes(weight.detach(), spec, None, (amax, None))[0], amax_t

    def weight_both(self, weight: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> tuple[Pair, Pair]:
        """As :meth:`weight` and :meth:`weight_t`."""
        return quantize_by_amaxes(weight, spec, spec_t, global_amax(weight, spec, spec_t, (self.n, self.k)))

    def weight_t(self, weight: Tensor, spec_t: QuantSpec, amax_t: Tensor | None, grad_output: Tensor) -> Pair:
        """Quantizes the shard by the amaxes that forward reduced."""
        return quantize_by_amaxes(weight, None, spec_t, (None, amax_t))[1]

    def grad_output(self, x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> tuple[Pair, Pair]:
        """``x`` is this rank's part."""
        return quantize_by_amaxes(x, spec, spec_t, global_amax(x, spec, spec_t, (self.m, self.n)))

    def grad_output_and_sum(self, x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> PairsAndSum:
        """As :meth:`grad_output`; the sum is of this rank's rows."""
        return *self.grad_output(x, spec, spec_t), x.sum(0)
