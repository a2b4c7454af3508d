"""A linear layer whose three GEMMs follow a recipe.

For an input ``[M, K]``, a weight ``[N, K]`` and the gradient of the output, ``grad_output [M, N]``, a layer computes

    output      = input @ weight.T              [M, N]   contracts over K
    grad_input  = grad_output @ weight          [M, K]   contracts over N
    grad_weight = grad_output.T @ input         [N, K]   contracts over M

Each tensor is read by two GEMMs that contract over different dims. FP8 tensor cores read their operands along the
contraction, and scales lie along it, so a tensor is quantized twice: untransposed for one GEMM, transposed for the
other. A recipe names the :class:`~tritonfp8.QuantSpec` of both operands of each GEMM.

A call goes from top to bottom:

    module           Float8Linear
    dispatch         linear(): picks the path for eager code, graphs, traces and sharded tensors
    input_cache      sibling layers share the cast of one input
    operands         OperandProvider: where the quantized operands come from; this rank quantizes by default
    function         the autograd function: runs the GEMMs, saves what backward reads

Exports the layer as a function and as a module, and the parts that sharded layers are built from.
"""

from tritonfp8.layers.first_order import first_order
from tritonfp8.layers.linear import traced
from tritonfp8.layers.linear.checks import autocast_all, autocast_dtype, cast_to, is_distributed
from tritonfp8.layers.linear.dispatch import linear, local_linear
from tritonfp8.layers.linear.function import (
    multiply,
    weight_t,
)
from tritonfp8.layers.linear.input_cache import SharedInput, compared_casts, forget, versions
from tritonfp8.layers.linear.module import (
    ConvertedLayer,
    Float8Conv1D,
    Float8Linear,
    computes_linear,
    is_conv1d,
    is_converted,
    require_module,
)
from tritonfp8.layers.linear.operands import (
    LOCAL,
    NO_PAIR,
    Amaxes,
    OperandProvider,
    Pair,
    PairsAndSum,
    found_together,
    quantize_for,
)
from tritonfp8.layers.linear.weight_cache import CachedWeight, Watch, sample_of
from tritonfp8.layers.linear.weight_scope import (
    quantize_weights_once,
    raise_changed,
    register_scope,
)
from tritonfp8.layers.linear.weight_source import (
    CASTS,
    CodesSource,
    Operands,
    WeightSource,
    quantize_weight,
    raise_without_transpose,
    read_operand,
    serves_both,
    source_of,
    weight_operands,
)
