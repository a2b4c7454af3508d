"""The host side of the kernels: validate, allocate, choose a tile, launch.

Exports the Triton twin of each op, and what the gather of FSDP2 casts many shards with.
"""

from tritonfp8.launch import shards
from tritonfp8.launch.cast import amax, dequantize, quantize, quantize_both, scaled_matmul, transpose
from tritonfp8.launch.fused import rms_norm_backward, rms_norm_quantize, silu_mul_backward_quantize, silu_mul_quantize
from tritonfp8.launch.kernel_cache import ALIGNMENT
from tritonfp8.launch.matmul import has_tma_layout, product_kind
from tritonfp8.launch.shards import GridPlace, Shard, ShardTable

__all__ = [
    "ALIGNMENT",
    "Shard",
    "GridPlace",
    "ShardTable",
    "amax",
    "dequantize",
    "has_tma_layout",
    "product_kind",
    "quantize",
    "quantize_both",
    "rms_norm_backward",
    "rms_norm_quantize",
    "scaled_matmul",
    "shards",
    "silu_mul_backward_quantize",
    "silu_mul_quantize",
    "transpose",
]
