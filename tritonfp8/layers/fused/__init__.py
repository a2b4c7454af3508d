"""Layers whose producer is fused with quantization: RMSNorm before linears, and the SwiGLU MLP.

Exports the functions, the modules, and the functions that ``convert(fuse=True)`` calls. A model that is converted
without ``fuse=True`` never imports this folder.
"""

from tritonfp8.layers.fused.functional import Produced, rms_norm_quantize, silu_mul_backward_quantize, silu_mul_quantize
from tritonfp8.layers.fused.match import fuse_model, recipes_of_norms, unfuse_model
from tritonfp8.layers.fused.modules import Float8RMSNorm, Float8SwiGLU
from tritonfp8.layers.fused.rms_norm import quantized_rms_norm
from tritonfp8.layers.fused.swiglu import swiglu

__all__ = [
    "Float8RMSNorm",
    "Float8SwiGLU",
    "Produced",
    "fuse_model",
    "quantized_rms_norm",
    "recipes_of_norms",
    "rms_norm_quantize",
    "silu_mul_backward_quantize",
    "silu_mul_quantize",
    "swiglu",
    "unfuse_model",
]
