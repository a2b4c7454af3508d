"""The host side of the kernels: plan a call (choose tiles, describe buffers and launches), run the plan, repeat it.

Exports the Triton twin of each op.
"""

from tritonfp8.launch.cast import amax, dequantize, quantize, quantize_both, scaled_matmul, transpose
from tritonfp8.launch.fused import rms_norm_backward, rms_norm_quantize, silu_mul_backward_quantize, silu_mul_quantize
from tritonfp8.launch.matmul import has_tma_layout, product_kind
from tritonfp8.launch.optimizer import adamw, adamw_amax
from tritonfp8.launch.plan import ALIGNMENT
from tritonfp8.launch.shards import amax_of_shards, quantize_shards

__all__ = [
    "ALIGNMENT",
    "adamw",
    "adamw_amax",
    "amax",
    "amax_of_shards",
    "dequantize",
    "has_tma_layout",
    "product_kind",
    "quantize",
    "quantize_both",
    "quantize_shards",
    "rms_norm_backward",
    "rms_norm_quantize",
    "scaled_matmul",
    "silu_mul_backward_quantize",
    "silu_mul_quantize",
    "transpose",
]
