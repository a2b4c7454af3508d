"""Linear layers on sharded tensors: tensor and sequence parallelism, the 8-bit all-gather of FSDP2, DTensor rules.

    tensor_parallel  a linear layer on DTensors, and parallel styles that send 8 bits
    expert_parallel  experts sharded over ranks
    fsdp             weights gathered in 8 bits
    gradients        gradients reduced in 8 bits, or in an order that no number of ranks changes
    shard_layout     which part of each dim lies here, and where its blocks begin
    global_scales    quantize shards by the scales of the global tensor
    stored_weights   weights that are stored in 8 bits and sharded
    weight_scope     weights that are quantized once for several passes

A layer gets its quantized operands from an :class:`~tritonfp8.layers.linear.OperandProvider` and, of its weight, from a
:class:`~tritonfp8.layers.linear.WeightSource`: ``tensor_parallel`` derives from both. The core does not import this
package: layers reach it by :mod:`tritonfp8.layers.extensions`.
"""

from torch.distributed.tensor import DTensor

# They check torch, and register the rules of the ops.
from tritonfp8.distributed import dtensor_rules, options, shard_layout, stored_weights, torch_private
from tritonfp8.distributed.expert_parallel import shard_experts
from tritonfp8.distributed.fsdp import GatheredWeight, enable_float8_all_gather
from tritonfp8.distributed.gradients import OrderedGradients, clip_grad_norm_, enable_float8_reduce_scatter
from tritonfp8.distributed.options import scales, token_counts
from tritonfp8.distributed.tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
    quantize_shard,
    sharded_linear,
)
from tritonfp8.distributed.traffic import count_collective_bytes
from tritonfp8.distributed.weight_scope import whole_together
from tritonfp8.layers import extensions
from tritonfp8.layers.linear import CodesSource

__all__ = [
    "Float8ColwiseParallel",
    "Float8RowwiseParallel",
    "OrderedGradients",
    "PrepareFloat8ModuleInput",
    "clip_grad_norm_",
    "count_collective_bytes",
    "enable_float8_all_gather",
    "enable_float8_reduce_scatter",
    "scales",
    "shard_experts",
    "sharded_linear",
    "token_counts",
]

extensions.fill(
    extensions.Extensions(
        tensor_type=DTensor,
        linear=sharded_linear,
        sources={GatheredWeight: CodesSource()},
        carried=options.Restored,
        whole_together=whole_together,
        quantize=quantize_shard,
        check_gather=stored_weights.check_stored_gather,
        store=stored_weights.store_sharded,
        shard=stored_weights.shard,
        values=stored_weights.values_of,
        whole=stored_weights.whole,
        reshard=stored_weights.reshard,
        put=stored_weights.put,
        place=stored_weights.place,
        starts=stored_weights.starts,
        local=stored_weights.local,
        cut_as=stored_weights.cut_as,
        distribute=shard_layout.distributed_as,
        amaxes=stored_weights.whole_amaxes,
    )
)
