"""The operands of a layer on DTensors whose weight is stored in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tritonfp8.distributed.global_scales import global_amax, quantize_by_amaxes
from tritonfp8.distributed.shard_layout import is_split
from tritonfp8.distributed.tensor_parallel.sharded_operands import ShardedOperands
from tritonfp8.layers.linear import Pair
from tritonfp8.layers.stored import StoredWeight, read_operand
from tritonfp8.specs import QuantSpec


@dataclass(frozen=True)
class StoredShardOperands(ShardedOperands):
    """Reads the weight from its codes, whose scales are those of the global weight; other operands are as usual.

    ``grad_input`` reads the transposed weight, quantized from this rank's values by the scales of the global one.
    """

    @property
    def weight_has_codes(self) -> bool:
        """True."""
        return True

    def weight(self, weight: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> tuple[Pair, Tensor | None]:
        """See :meth:`ShardedOperands.weight`: here only the amaxes of ``weight.T`` are reduced, where ranks share one.

        Raises:
            ValueError: the weight is stored for another recipe.
        """
        assert spec is not None
        pair = read_operand(weight, spec, False)
        # Square blocks of one spec: the transpose of the codes serves.
        if spec_t is None or (spec_t == spec and spec.block[0] == spec.block[1]):
            return pair, None
        layouts = self.n, self.k
        if not any(is_split(layouts[i], spec_t.block[1 - i]) for i in (0, 1)):
            return pair, None
        return pair, global_amax(_values(weight), None, spec_t, layouts)[1]

    def weight_both(self, weight: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> tuple[Pair, Pair]:
        """Never called: nobody caches operands of a weight that has codes."""
        raise AssertionError("a stored weight is not cached")

    def weight_t(self, weight: Tensor, spec_t: QuantSpec, amax_t: Tensor | None, grad_output: Tensor) -> Pair:
        """The transpose, by the amaxes that forward reduced."""
        if amax_t is None:
            return read_operand(weight, spec_t, True, grad_output)
        return quantize_by_amaxes(_values(weight), None, spec_t, (None, amax_t))[1]


def _values(weight: Tensor) -> Tensor:
    if isinstance(weight, StoredWeight):
        return weight.dequantize()
    # An op, because a graph does not look into tensor types: the transpose of a shard is that of its values.
    return torch.t(weight.detach()).t()
