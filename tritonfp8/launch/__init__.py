"""The host side of the kernels: plan a call (choose tiles, describe buffers and launches), run the plan, repeat it.

Exports the Triton twin of each op, what plans it, and what repeats a plan.
"""

from tritonfp8.launch.cast import (
    amax,
    dequantize,
    plan_dequantize,
    plan_quantize,
    plan_quantize_both,
    plan_transpose,
    quantize,
    quantize_both,
    transpose,
)
from tritonfp8.launch.casts import (
    MOST_WEIGHTS,
    plan_quantize_both_sum,
    quantize_both_sum,
    quantize_weights,
)
from tritonfp8.launch.executor import generation, repeat_of
from tritonfp8.launch.figures import operand_figures, plan_operand_figures
from tritonfp8.launch.fused import (
    plan_rms_norm_backward,
    plan_rms_norm_quantize,
    plan_silu_mul_backward_quantize,
    plan_silu_mul_quantize,
    rms_norm_backward,
    rms_norm_quantize,
    silu_mul_backward_quantize,
    silu_mul_quantize,
)
from tritonfp8.launch.matmul import has_tma_layout, plan_scaled_matmul, product_kind, scaled_matmul
from tritonfp8.launch.moe import (
    grouped_matmul,
    grouped_sum,
    plan_grouped_matmul,
    plan_quantize_groups,
    plan_quantize_groups_both,
    plan_quantize_matrices,
    plan_scaled_grouped_matmul,
    plan_sum_of_rows,
    plan_swiglu,
    plan_swiglu_backward,
    quantize_groups,
    quantize_groups_both,
    quantize_matrices,
    scaled_grouped_matmul,
    sum_of_rows,
    swiglu,
    swiglu_backward,
)
from tritonfp8.launch.optimizer import adamw, adamw_amax
from tritonfp8.launch.plan import ALIGNMENT
from tritonfp8.launch.shards import amax_of_shards, quantize_shards

__all__ = [
    "ALIGNMENT",
    "MOST_WEIGHTS",
    "adamw",
    "adamw_amax",
    "amax",
    "amax_of_shards",
    "dequantize",
    "generation",
    "grouped_matmul",
    "grouped_sum",
    "has_tma_layout",
    "operand_figures",
    "plan_dequantize",
    "plan_grouped_matmul",
    "plan_operand_figures",
    "plan_quantize",
    "plan_quantize_both",
    "plan_quantize_both_sum",
    "plan_quantize_groups",
    "plan_sum_of_rows",
    "plan_swiglu",
    "plan_swiglu_backward",
    "sum_of_rows",
    "swiglu",
    "swiglu_backward",
    "plan_quantize_groups_both",
    "plan_quantize_matrices",
    "plan_rms_norm_backward",
    "plan_rms_norm_quantize",
    "plan_scaled_grouped_matmul",
    "plan_scaled_matmul",
    "plan_silu_mul_backward_quantize",
    "plan_silu_mul_quantize",
    "plan_transpose",
    "product_kind",
    "quantize",
    "quantize_both",
    "quantize_both_sum",
    "quantize_weights",
    "quantize_groups",
    "quantize_groups_both",
    "quantize_matrices",
    "quantize_shards",
    "repeat_of",
    "rms_norm_backward",
    "rms_norm_quantize",
    "scaled_grouped_matmul",
    "scaled_matmul",
    "silu_mul_backward_quantize",
    "silu_mul_quantize",
    "transpose",
]
