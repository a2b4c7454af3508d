"""The only place where ops are registered with torch.

Exports the ops as functions, the table of their rows (:data:`OPS`), and what code needs while a graph is traced.
"""

from tritonfp8.launch import ALIGNMENT
from tritonfp8.ops import flops, graph_op  # noqa: F401  flops registers the FLOPs of the ops
from tritonfp8.ops.batching import each_sample
from tritonfp8.ops.registry import (
    NAMESPACE,
    OPS,
    Op,
    adamw,
    adamw_amax,
    amax,
    amax_of_shards,
    dequantize,
    gathered_operand,
    implement,
    matmul,
    operand_figures,
    quantize,
    quantize_both,
    quantize_shards,
    rms_norm_backward,
    rms_norm_quantize,
    saved,
    scaled_matmul,
    silu_mul_backward_quantize,
    silu_mul_quantize,
    transpose,
    weight_operand,
    whole_linear,
    whole_linear_backward,
    without_backward,
)
from tritonfp8.ops.sharding import Operand, Rule
from tritonfp8.ops.shards import GridPlace, casts_shards, places_to_read, places_to_write
from tritonfp8.ops.tracing import is_exporting, is_traced, sealed
from tritonfp8.reference import rounding_keys

__all__ = [
    "ALIGNMENT",
    "GridPlace",
    "casts_shards",
    "places_to_read",
    "places_to_write",
    "NAMESPACE",
    "OPS",
    "Op",
    "Operand",
    "Rule",
    "adamw",
    "adamw_amax",
    "amax",
    "amax_of_shards",
    "dequantize",
    "each_sample",
    "gathered_operand",
    "graph_op",
    "implement",
    "is_exporting",
    "is_traced",
    "matmul",
    "quantize",
    "quantize_both",
    "quantize_shards",
    "operand_figures",
    "rms_norm_backward",
    "rms_norm_quantize",
    "rounding_keys",
    "saved",
    "scaled_matmul",
    "sealed",
    "silu_mul_backward_quantize",
    "silu_mul_quantize",
    "transpose",
    "weight_operand",
    "whole_linear",
    "whole_linear_backward",
    "without_backward",
]
