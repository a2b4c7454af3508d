"""GEMMs on quantized operands: the choice of a kernel and its plan.

gemm       the operands of a GEMM, dense or of groups
scaled     kernels that read codes
widened    MX operands where no tensor core takes them, dequantized to bf16 first
"""

from tritonfp8.launch.matmul.gemm import (
    SWIZZLE,
    WIDE,
    GemmOperands,
    has_usual_layout,
    is_readable_along_k,
    matrices,
    programs,
    scale_along_k,
    tile_sizes,
)
from tritonfp8.launch.matmul.scaled import (
    has_tma_layout,
    plan_scaled_matmul,
    product_kind,
    readable_along_k,
    scaled_matmul,
)
from tritonfp8.launch.matmul.widened import ROW_UNIT, plan_operand, too_many_scales
