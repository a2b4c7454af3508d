"""The operands of a linear layer whose input, weight and output are shards of global tensors.

The weight may be stored or gathered in 8 bits: its codes have the scales of the global weight already.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.distributed.collectives import all_reduce
from tritonfp8.distributed.global_scales import (
    amax_of_codes,
    global_amax,
    quantize_by_amaxes,
    quantize_codes,
    quantize_shard,
)
from tritonfp8.distributed.shard_layout import DimLayout, align, is_split, unalign
from tritonfp8.distributed.tensor_parallel.token_gather import TokenGather, own_sum, quantize_and_gather
from tritonfp8.layers.linear import (
    NO_PAIR,
    CodesSource,
    Later,
    OperandProvider,
    Pair,
    PairsAndSum,
    Specs,
    WeightSource,
    quantize_later,
    read_operand,
)
from tritonfp8.layers.stored import StoredWeight


@dataclass(frozen=True)
class ShardedOperands(OperandProvider):
    """Quantizes shards by the scales of the global tensors, and gathers an input whose tokens are sharded.

    Attributes:
        m, n, k: the layouts of the tokens, the out features and the in features, as the scales see them.
        gather: how the input's tokens are gathered in 8 bits; None if they are not.
        gathered_k: the layout of the in features of a gathered input, whose scales are always the global ones.
        scatter: how ranks sum the output and scatter its tokens, whose gradient they gather in 8 bits; None if the
            layer does not.
        scattered_n: the layout of the out features of a scattered output.
    """

    m: DimLayout
    n: DimLayout
    k: DimLayout
    gather: TokenGather | None
    gathered_k: DimLayout
    scatter: TokenGather | None
    scattered_n: DimLayout

    @property
    def input_key(self) -> object:
        """Sibling layers differ in their out features, which the cast of an input does not depend on."""
        return (self.m, self.k) if self.gather is None else (self.gather, self.gathered_k)

    def input(self, x: Tensor, specs: Specs) -> tuple[Pair, Pair]:
        """``x`` is this rank's part; with a gather, the operands have the tokens of all ranks."""
        if self.gather is not None:
            return quantize_and_gather(x, specs, self.gather, self.gathered_k)
        return quantize_shard(x, specs, (self.m, self.k))

    def input_now(self, x: Tensor, specs: Specs) -> tuple[Pair, Tensor | None]:
        """As :meth:`input`; backward reduces its own amaxes."""
        return self.input(x, specs._replace(spec_t=None))[0], None

    def input_later(self, x: Tensor, how: Later) -> Pair:
        """As :meth:`input`."""
        return self.input(x, Specs(None, how.spec_t, how.codes))[1]

    def output(self, out: Tensor) -> Tensor:
        """The rows of the sum over ranks that are this rank's, if the layer scatters it."""
        if self.scatter is None:
            return out
        return own_sum(unalign(self.scattered_n, unalign(self.scatter.target, out, 0), 1), self.scatter)

    def grad_output(self, x: Tensor, specs: Specs) -> tuple[Pair, Pair]:
        """``x`` is this rank's part; of a scattered output, the operands have the tokens of all ranks."""
        if self.scatter is not None:
            return quantize_and_gather(x, specs, self.scatter, self.scattered_n)
        return quantize_shard(x, specs, (self.m, self.n))

    def grad_output_and_sum(self, x: Tensor, specs: Specs) -> PairsAndSum:
        """As :meth:`grad_output`; the sum is of the rows whose gradient this rank computes."""
        if self.scatter is None:
            return *self.grad_output(x, specs), x.sum(0)
        total = all_reduce(x.sum(0, dtype=torch.float32), "sum", self.scatter.group).to(x.dtype)
        return *self.grad_output(x, specs), align(self.scattered_n, total, 0)


@dataclass(frozen=True)
class ShardedWeight(WeightSource):
    """Quantizes a shard of a weight by the scales of the global one.

    Attributes:
        n, k: see :class:`ShardedOperands`.
    """

    n: DimLayout
    k: DimLayout

    def now(self, weight: Tensor, specs: Specs) -> tuple[Pair, Tensor | None]:
        """Reduces the amaxes of both orientations in one collective.

        The reduction runs in forward. In backward it would depend only on the weight, so the partitioner of each rank
        could place the collective in a different graph, and the ranks would deadlock.
        """
        spec, spec_t, codes = specs
        if codes is not None and spec_t is not None:
            pair, amax_t = quantize_codes(weight.detach(), codes, spec_t, (self.n, self.k))
            return NO_PAIR if spec is None else pair, amax_t
        amax, amax_t = global_amax(weight.detach(), spec, spec_t, (self.n, self.k))
        return quantize_by_amaxes(weight.detach(), spec, None, (amax, None))[0], amax_t

    def later(self, weight: Tensor, how: Later, grad_output: Tensor | None) -> Pair:
        """Quantizes the shard by the amaxes that forward reduced."""
        return quantize_later(weight, how)

    def both(self, weight: Tensor, specs: Specs) -> tuple[Pair, Pair]:
        """As :meth:`now` and :meth:`later`."""
        return quantize_shard(weight, specs, (self.n, self.k))


@dataclass(frozen=True)
class GatheredShard(CodesSource):
    """Reads this rank's part of a weight that FSDP2 gathered in 8 bits.

    The codes have the scales of the global weight already, also if other scales are local. A transpose that is made
    from them may have blocks on several ranks.

    Attributes:
        n, k: the layouts of the out features and the in features.
    """

    n: DimLayout
    k: DimLayout

    def now(self, weight: Tensor, specs: Specs) -> tuple[Pair, Tensor | None]:
        """See :meth:`ShardedWeight.now`: here only the amaxes of the transpose of the codes are reduced."""
        pair, _ = super().now(weight, specs)
        if specs.spec_t is None or specs.codes is None:
            return pair, None
        return pair, amax_of_codes(pair, specs.codes, specs.spec_t, (self.n, self.k))

    def later(self, weight: Tensor, how: Later, grad_output: Tensor | None) -> Pair:
        """The transpose, by the amaxes that forward reduced; the weight may have been gathered again since."""
        if how.amax_t is None or how.codes is None:
            return super().later(weight, how, grad_output)
        pair = read_operand(weight, how.codes, False, grad_output)
        return ops.transpose_codes(*pair, *how.codes.args, *how.spec_t.args, how.amax_t)


@dataclass(frozen=True)
class StoredShard(CodesSource):
    """Reads a shard of a weight that is stored in 8 bits.

    ``grad_input`` reads the transposed weight, quantized from this rank's values by the scales of the global one.

    Attributes:
        n, k: see :class:`ShardedOperands`.
    """

    n: DimLayout
    k: DimLayout

    def now(self, weight: Tensor, specs: Specs) -> tuple[Pair, Tensor | None]:
        """See :meth:`ShardedWeight.now`: here only the amaxes of ``weight.T`` are reduced, where ranks share one."""
        spec, spec_t, _ = specs
        assert spec is not None
        pair, _ = super().now(weight, specs)
        # Square blocks of one spec: the transpose of the codes serves.
        if spec_t is None or (spec_t == spec and spec.block[0] == spec.block[1]):
            return pair, None
        layouts = self.n, self.k
        if not any(is_split(layouts[i], spec_t.block[1 - i]) for i in (0, 1)):
            return pair, None
        return pair, global_amax(_values(weight), None, spec_t, layouts)[1]

    def later(self, weight: Tensor, how: Later, grad_output: Tensor | None) -> Pair:
        """The transpose, by the amaxes that forward reduced."""
        if how.amax_t is None:
            return read_operand(weight, how.spec_t, True, grad_output)
        return quantize_by_amaxes(_values(weight), None, how.spec_t, (None, how.amax_t))[1]


def _values(weight: Tensor) -> Tensor:
    if isinstance(weight, StoredWeight):
        return weight.dequantize()
    # An op, because a graph does not look into tensor types: the transpose of a shard is the transpose of its values.
    return torch.t(weight.detach()).t()
