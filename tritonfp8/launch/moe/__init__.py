"""Launch the casts and GEMMs of groups. Nothing reads the offsets of groups on the host.

Exports the Triton twin of each op of groups, and what plans it.
"""

from tritonfp8.launch.moe.casts import (
    grouped_sum,
    plan_quantize_groups,
    plan_quantize_groups_both,
    plan_quantize_matrices,
    plan_quantize_matrices_with_amax,
    plan_swiglu_backward_amax,
    quantize_groups,
    quantize_groups_both,
    quantize_matrices,
    quantize_matrices_with_amax,
    swiglu_backward_amax,
    swiglu_backward_amax_,
)
from tritonfp8.launch.moe.matmul import (
    grouped_matmul,
    grouped_product_kind,
    plan_scaled_grouped_matmul,
    scaled_grouped_matmul,
)
from tritonfp8.launch.moe.rows import (
    dots_of_rows,
    plan_dots_of_rows,
    plan_sum_of_rows,
    plan_swiglu,
    plan_swiglu_backward,
    sum_of_rows,
    swiglu,
    swiglu_backward,
    swiglu_backward_,
)
