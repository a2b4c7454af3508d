"""Casts of tensors and of groups. Nothing reads the offsets of groups on the host.

side            one result of a cast
partial_maxima  the amax of blocks that span a whole dim
lines           casts to scales of whole rows or columns that read each element once
dense           casts of one tensor in one orientation
both            casts of one tensor in both
transposes      transposes of several matrices by two launches
codes           transposes that are made from codes
packed          casts of formats of two codes a byte
weights         casts of several weights in one launch
groups          one pass over groups of rows, or over matrices
grouped         the ops of groups and of matrices

Exports the Triton twin of each op.
"""

from tritonfp8.launch.casts.both import quantize_both, quantize_both_sum, quantize_with_amax
from tritonfp8.launch.casts.codes import transpose_codes, transpose_group_codes
from tritonfp8.launch.casts.dense import amax, dequantize, quantize, quantize_into, transpose
from tritonfp8.launch.casts.grouped import (
    grouped_sum,
    quantize_groups,
    quantize_groups_both,
    quantize_matrices,
    quantize_matrices_with_amax,
    swiglu_backward_amax,
    swiglu_backward_amax_,
)
from tritonfp8.launch.casts.packed import add_row_scales, expand_codes, has_words, measure_rows
from tritonfp8.launch.casts.transposes import MOST_WEIGHTS
from tritonfp8.launch.casts.weights import quantize_weights
