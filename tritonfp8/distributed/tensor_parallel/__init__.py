"""Tensor and sequence parallelism: a linear layer on DTensors, and the parallel styles that make them.

Exports the layer and the styles.
"""

from tritonfp8.distributed.tensor_parallel.linear import quantize_shard, sharded_linear
from tritonfp8.distributed.tensor_parallel.styles import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)

__all__ = [
    "Float8ColwiseParallel",
    "Float8RowwiseParallel",
    "PrepareFloat8ModuleInput",
    "quantize_shard",
    "sharded_linear",
]
