"""Sharding rules and FP8 collectives. The core never imports this subpackage."""

from tritonfp8.distributed import dtensor_rules, torch_private  # noqa: F401  check torch, register the rules of the ops
from tritonfp8.distributed.fsdp import enable_float8_all_gather
from tritonfp8.distributed.options import scales, token_counts
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
    "count_collective_bytes",
    "enable_float8_all_gather",
    "scales",
    "sharded_linear",
    "token_counts",
]
