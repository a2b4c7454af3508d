"""Linear layers on sharded tensors: tensor and sequence parallelism, the 8-bit all-gather of FSDP2, DTensor rules.

    tensor_parallel  a linear layer on DTensors, and parallel styles that send 8 bits
    expert_parallel  experts sharded over ranks
    fsdp             weights gathered in 8 bits
    shard_layout     which part of each dim lies here, and where its blocks begin
    global_scales    quantize shards by the scales of the global tensor
    stored_weights   weights that are stored in 8 bits and sharded
    weight_scope     weights that are quantized once for several passes

A layer gets its quantized operands from an :class:`~tritonfp8.layers.linear.OperandProvider`, from which both folders
derive. The core never imports this package.
"""

# They check torch, and register the rules of the ops and the weights of quantize_weights_once.
from tritonfp8.distributed import dtensor_rules, stored_weights, torch_private, weight_scope
from tritonfp8.distributed.expert_parallel import shard_experts
from tritonfp8.distributed.fsdp import enable_float8_all_gather
from tritonfp8.distributed.options import scales, token_counts
from tritonfp8.distributed.stored_weights import check_stored_gather
from tritonfp8.distributed.tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
    sharded_linear,
)
from tritonfp8.distributed.traffic import count_collective_bytes

__all__ = [
    "Float8ColwiseParallel",
    "Float8RowwiseParallel",
    "PrepareFloat8ModuleInput",
    "check_stored_gather",
    "count_collective_bytes",
    "enable_float8_all_gather",
    "scales",
    "shard_experts",
    "sharded_linear",
    "token_counts",
]
