"""Each op in plain torch, on any device, with the op's parameters: this code defines the correct results.

Exports one function for each op, with the op's name. Kernels equal the casts to the bit, and the GEMMs within
tolerances.
"""

from tritonfp8.reference.attention import SPLIT, SUB_TILE, check_attention, exact_attention, exact_attention_backward
from tritonfp8.reference.casts import (
    amax,
    dequantize,
    quantize,
    quantize_both,
    quantize_both_sum,
    quantize_into,
    quantize_weights,
    quantize_with_amax,
    transpose,
)
from tritonfp8.reference.chains import FUNCTIONS, Chain, ChainStep, TensorPlace, chain, recorded
from tritonfp8.reference.codes import (
    expand_codes,
    measure_rows,
    packed_grouped_matmul,
    packed_matmul,
    quantize_groups_both,
    transpose_codes,
    transpose_group_codes,
)
from tritonfp8.reference.exact import (
    check_gated,
    check_norm,
    check_temperature,
    gated,
    gated_backward,
    rms_norm,
    rms_norm_backward,
    rotary_tables,
    row_logsumexp,
)
from tritonfp8.reference.figures import FIGURES, operand_figures
from tritonfp8.reference.gemms import matmul, scaled_matmul
from tritonfp8.reference.grouped import (
    dots_of_rows,
    group_amax,
    group_bounds,
    grouped_matmul,
    grouped_sum,
    quantize_groups,
    quantize_matrices,
    quantize_matrices_with_amax,
    read_rows,
    scaled_grouped_matmul,
    sum_of_rows,
    swiglu,
    swiglu_backward,
    swiglu_backward_amax,
)
from tritonfp8.reference.optimizer import (
    adamw,
    adamw_amax,
    check_packed,
    quantize_at_random,
    rounding_keys,
    write_scales,
)
from tritonfp8.reference.routing import routed
from tritonfp8.reference.shards import (
    PART,
    amax_of_shards,
    check_parts,
    check_sum,
    part_sizes,
    quantize_parts,
    quantize_shards,
    sum_in_pairs,
)
