"""Launch the casts and GEMMs of groups. Nothing reads the offsets of groups on the host.

Exports the Triton twin of each op of groups, and what plans it.
"""

from tritonfp8.launch.moe.casts import (
    grouped_sum,
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
    scaled_grouped_matmul,
)
from tritonfp8.launch.moe.rows import (
    dots_of_rows,
    sum_of_rows,
    swiglu,
    swiglu_backward,
    swiglu_backward_,
)
