"""GEMMs on quantized operands: the choice of a kernel and its plan.

scaled     kernels that read codes
widened    MX operands where no tensor core takes them, dequantized to bf16 first
"""

from tritonfp8.launch.matmul.scaled import (
    PROMOTION,
    SWIZZLE,
    has_tma_layout,
    is_readable_along_k,
    plan_scaled_matmul,
    product_kind,
    readable_along_k,
    scale_along_k,
    scaled_matmul,
)
from tritonfp8.launch.matmul.widened import ROW_UNIT, WIDE, plan_operand, too_many_scales
