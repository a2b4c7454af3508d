"""GEMMs on quantized operands: the choice of a kernel and its plan.

scaled     kernels that read codes
widened    MX operands where no tensor core takes them, dequantized to bf16 first
"""

from tritonfp8.launch.matmul.scaled import has_tma_layout, plan_scaled_matmul, product_kind, scaled_matmul

__all__ = ["has_tma_layout", "plan_scaled_matmul", "product_kind", "scaled_matmul"]
