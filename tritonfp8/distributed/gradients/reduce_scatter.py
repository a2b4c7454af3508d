"""The reduce-scatter of FSDP2 as an all-to-all of parts and a sum in pairs of ranks: ((0 + 1) + (2 + 3)) + ...

A ring adds in an order that depends on its route, and would round to 8 bits again at each hop. Here each rank sends
each other one its part once, in 8 bits or as it is, and adds the parts that it receives in float32. An all-to-all
carries as many bytes over each link as a ring: ``(W - 1) / W`` of the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tritonfp8 import ops
from tritonfp8.distributed.fsdp import managed_parameters
from tritonfp8.layers.linear import require_module
from tritonfp8.specs.naming import listed


class PairwiseReduceScatter:
    """The reduce-scatter that FSDP2 calls for the gradients of one ``fully_shard``, by its protocol for custom ones.

    Args:
        is_quantized: whether parts travel as codes with a scale for 128 elements, rounded at random without bias.
    """

    def __init__(self, is_quantized: bool) -> None:
        self.is_quantized = is_quantized

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a gradient or for its reduced part."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Reduce ``input_tensor [ranks * n]`` over the group; this rank's part of the result is ``output_tensor [n]``.

        Raises:
            ValueError: a reduction that is no sum, or one that does not block the stream.
        """
        if async_op:
            raise ValueError("a reduce-scatter in pairs of ranks is not asynchronous: call it with async_op=False")
        factor = _factor_of(op, group.size())
        if self.is_quantized:
            sent = ops.quantize_parts(input_tensor, group.size(), group.rank())
        else:
            sent = input_tensor.view(group.size(), -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        ops.sum_in_pairs(output_tensor, received, factor)


def _factor_of(op: object, ranks: int) -> float:
    """The number by which a reduction multiplies a sum."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / ranks
    if op == dist.ReduceOp.PREMUL_SUM:
        # The state that it is pickled by: it has no public attribute. The factor may be a tensor.
        state: Any = op.__getstate__()
        return float(state[1])
    raise ValueError(f"gradients are reduced by SUM, AVG or PREMUL_SUM; got {op}")


def reduce_in_pairs(user: str, model: nn.Module, is_quantized: bool) -> list[FSDPModule]:
    """Have every ``fully_shard`` in ``model`` reduce by :class:`PairwiseReduceScatter`; returns their modules.

    Args:
        user: the public name that needs it, for messages.
        model: a module above all modules of ``fully_shard``.
        is_quantized: whether gradients are sent in 8 bits.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: FSDP2 does not shard it, or replicates a part of it.
    """
    require_module(model)
    modules: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError(f"{user} needs a model that FSDP2 shards: call fully_shard before")
    managed = managed_parameters(model.modules()).values()
    if replicated := sorted({each.name for each in managed if each.is_replicated}):
        raise ValueError(
            f"{listed(replicated)} is replicated and not sharded, and torch all-reduces its gradient: {user} needs "
            "fully_shard on it"
        )
    comm = PairwiseReduceScatter(is_quantized)
    for module in modules:
        # Its base class in torch is not public, and FSDP2 does not ask for it.
        module.set_custom_reduce_scatter(comm)  # type: ignore[arg-type]
    return modules


def enable_float8_reduce_scatter(model: nn.Module) -> None:
    """Reduce gradients under FSDP2 in 8 bits: a quarter of the bytes of float32, half the bytes of bfloat16.

    Call it after ``fully_shard``, on any module above it; ``convert`` is not needed::

        for block in model.layers:
            fully_shard(block, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32))
        fully_shard(model, mp_policy=...)
        enable_float8_reduce_scatter(model)

    Each rank rounds its gradient once: to e4m3 with a scale, a power of two, for 128 elements. It rounds at random, so
    that the mean over ranks and steps has no bias. The random bits are a hash of the gradient and of the rank: a
    resumed run needs no state, and has the same bits. The sum is float32, in pairs of ranks. A gradient that is not
    finite makes the 128 elements around it NaN.

    The losses are not those without it: each element gets an error of up to an eighth of it on each rank.

    Works with ``reduce_dtype`` float32, bfloat16 and float16, uneven shards, gradient accumulation, CPU offload,
    ``torch.compile`` and divide factors of FSDP2. With HSDP the all-reduce that follows is torch's, in
    ``reduce_dtype``.

    Raises:
        TypeError: ``model`` is no module. In backward: gradients are reduced in another dtype.
        ValueError: FSDP2 does not shard the model, or replicates a part of it.
    """
    reduce_in_pairs("enable_float8_reduce_scatter", model, True)
