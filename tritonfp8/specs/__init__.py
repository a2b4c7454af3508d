"""How tensors are quantized: formats, specs, quantized tensors, tolerances, and the checks of arguments.

    formats     number formats of elements and scales
    quant_spec  QuantSpec: how a tensor is quantized, and which pairs of specs a GEMM supports
    quantized   Quantized, QuantizedGroups: codes with their scales
    testing     how close a result must be to its reference
    checks      checks of arguments: each raises an error that names what was required and what came
    naming      names of layers in reports and messages: repeated ones are one

Exports the files, and the names of quant_spec.
"""

from tritonfp8.specs import checks, formats, naming, quantized, testing
from tritonfp8.specs.quant_spec import (
    ACCUMULATIONS,
    ACTIVATIONS,
    BLOCK_1X32,
    BLOCK_1X128,
    BLOCK_128X128,
    BLOCKS,
    COLUMNWISE,
    EXPANDED,
    GROUP_ALIGNMENT,
    MXFP4,
    NVFP4,
    READ_SPECS,
    ROWWISE,
    SCALE_ALIGNMENT,
    SPECS,
    TENSORWISE,
    QuantSpec,
    amax_shape,
    are_transposable,
    block_of,
    check_group_spec,
    check_transposable,
    empty_grouped_scale,
    empty_scale,
    expands_to,
    full_block,
    group_amax_sizes,
    group_column,
    grouped_columns,
    grouped_scale_shape,
    matmul_family,
    moves_codes,
    scale_shape,
    spec_of,
    transposed,
)
