"""A linear layer whose three GEMMs follow a recipe.

For an input ``[M, K]``, a weight ``[N, K]`` and the gradient of the output, ``grad_output [M, N]``, a layer computes

    output      = input @ weight.T              [M, N]   contracts over K
    grad_input  = grad_output @ weight          [M, K]   contracts over N
    grad_weight = grad_output.T @ input         [N, K]   contracts over M

Each tensor is read by two GEMMs that contract over different dims. FP8 tensor cores read their operands along the
contraction, and scales lie along it, so a tensor is quantized twice: untransposed for one GEMM, transposed for the
other. A recipe names the :class:`~tritonfp8.QuantSpec` of both operands of each GEMM.

A layer is computed in one of ten ways, with the same bits. :func:`.dispatch.linear` picks the first row that fits:

    where the call is          operands                         what computes it
    -------------------------  -------------------------------  ------------------------------------------------
    torch.func                 plain                            transforms: autograd functions that transforms take
    torch.func, traced         plain                            traced: one op with its gradient
    torch.compile              plain                            ops.graph_op: one op for the whole layer
    anywhere                   DTensor                          distributed.sharded_linear, which calls local_linear
    torch.export, make_fx      plain                            traced: one op with its gradient
    eager or torch.compile     plain, weight quantized once     local_linear, codes from the caller
    eager or torch.compile     weight stored in 8 bits          local_linear, codes from the weight
    eager or torch.compile     weight that FSDP2 gathered       local_linear, codes from the gathered bytes
    eager                      plain, input shared by siblings  local_linear, the first sibling casts for all
    eager                      plain                            local_linear

The files, from top to bottom:

    module           Float8Linear
    dispatch         linear(), and local_linear(): operands, then the autograd function
    input_cache      sibling layers share the cast of one input
    operands         OperandProvider: casts of the input and of the gradient
    weight_source    WeightSource: casts of the weight, or its codes
    function         the autograd function: runs the GEMMs, saves what backward reads
    weight_scope     weights that are quantized once for several passes; weight_cache has one of them

Exports the layer as a function and as a module, and the parts that sharded layers are built from.
"""

from tritonfp8.layers.first_order import first_order
from tritonfp8.layers.linear import traced
from tritonfp8.layers.linear.checks import autocast_all, autocast_dtype, cast_to, is_distributed
from tritonfp8.layers.linear.dispatch import linear, local_linear
from tritonfp8.layers.linear.function import (
    multiply,
)
from tritonfp8.layers.linear.input_cache import SharedInput, compared_casts, forget
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
    Later,
    OperandProvider,
    Pair,
    PairsAndSum,
    Specs,
    found_together,
    quantize_for,
    quantize_later,
    quantize_now,
)
from tritonfp8.layers.linear.weight_cache import CachedWeight
from tritonfp8.layers.linear.weight_scope import (
    Weights,
    quantize_weights_once,
    raise_changed,
    register_finder,
)
from tritonfp8.layers.linear.weight_source import (
    CASTS,
    CodesSource,
    Operands,
    PackedSource,
    WeightSource,
    quantize_weight,
    raise_without_transpose,
    read_operand,
    rounded,
    serves_both,
    source_for,
    source_of,
    weight_operands,
)
