"""The table of ops: a row has the schema, fake, reference, launch and sharding of one op.

Ops are registered by ``Library.define`` and ``impl``: ``custom_op`` costs a third more host time a call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from tritonfp8 import launch, reference
from tritonfp8.ops import batching, direct, fakes
from tritonfp8.ops.dispatch import (
    chained,
    counted,
    grouped_contraction,
    matmul_kind,
    on_cuda,
    packed_groups_kind,
    scaled_matmul_kind,
)
from tritonfp8.ops.sharding import Operand, Rule

NAMESPACE = "tritonfp8"
_library = torch.library.Library(NAMESPACE, "DEF")
_overloads: dict[str, Any] = {}


@dataclass(frozen=True)
class Op:
    """One op.

    Attributes:
        schema: arguments and results, as torch spells them.
        fake: the results without their values, a function of :mod:`tritonfp8.ops.fakes` with the name of the op. None
            for an op that consists of other ops, or that a tensor subclass implements.
        reference: the op in plain torch, with the parameters and defaults of the schema. It runs on a CPU and defines
            what the kernels must return. None for an op that another module implements (:func:`implement`).
        launch: the same by kernels. None if the reference runs on CUDA, too. Where a plan serves all that it does, it
            has an attribute ``plannable``.
        kind: the kind under which a GEMM is counted (:mod:`tritonfp8.compat.counting`).
        contraction: the K with which it is counted, from its arguments. None for the columns of the first one.
        sharding: how DTensor may shard it. None for an op that is not called on DTensors, or that takes or returns a
            list of tensors: the schema does not say how many there are.
    """

    schema: str
    fake: Callable[..., Any] | None = None
    reference: Callable[..., Any] | None = None
    launch: Callable[..., Any] | None = None
    kind: Callable[..., str] | None = None
    contraction: Callable[..., int] | None = None
    sharding: Rule | None = None


_OF = "Tensor x, Tensor offsets, str spec"
_ROWS = "Tensor? rows=None, Tensor? factors=None, bool swiglu=False"
# Of the ops of SwiGLU's gradient.
_GATE_UP = 1
# Optional tensors come last, where the dispatcher leaves out a None: torch.export.draft_export takes an
# optional tensor that is passed as None for one that the op writes to.
_CACHED_WEIGHT = "Tensor? qdata=None, Tensor? scale=None, Tensor? qdata_t=None, Tensor? scale_t=None"

_CASTS = {
    "amax": Op(
        "(Tensor x, int[] block) -> Tensor",
        sharding=Rule({"x": Operand("RC")}, (Operand("RC", "block", "max"),)),
    ),
    "quantize": Op(
        "(Tensor x, str spec, bool transpose=False, Tensor? amax=None) -> (Tensor, Tensor)",
        sharding=Rule(
            {"x": Operand("RC"), "amax": Operand("RC", "spec")},
            (Operand("RC"), Operand("RC", "spec")),
            flag="transpose",
            needs="amax",
        ),
    ),
    # By whoever must keep the addresses of codes, or has no memory for a second set of them.
    "quantize_into": Op("(Tensor(a!) qdata, Tensor(b!) scale, Tensor x, str spec) -> ()"),
    "quantize_both": Op(
        "(Tensor x, str spec, str spec_t, bool codes=False) -> (Tensor, Tensor, Tensor, Tensor)",
        sharding=Rule(
            {"x": Operand("RC")},
            (Operand("RC"), Operand("RC", "spec", None), Operand("CR"), Operand("CR", "spec_t", None)),
        ),
    ),
    "quantize_both_sum": Op(
        "(Tensor x, str spec, str spec_t, bool codes=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "quantize_with_amax": Op("(Tensor x, str spec, str spec_t, bool codes=False) -> (Tensor, Tensor, Tensor)"),
    "dequantize": Op(
        "(Tensor qdata, Tensor scale, str spec, ScalarType dtype) -> Tensor",
        sharding=Rule({"qdata": Operand("RC"), "scale": Operand("RC", "spec")}, (Operand("RC"),)),
    ),
    "expand_codes": Op(
        "(Tensor qdata, Tensor scale, str spec, Tensor? row_scale=None, Tensor? offsets=None) -> (Tensor, Tensor)"
    ),
    "measure_rows": Op("(Tensor qdata, Tensor scale, str spec) -> (Tensor, Tensor)"),
    "transpose": Op(
        "(Tensor qdata) -> Tensor",
        sharding=Rule({"qdata": Operand("RC")}, (Operand("CR"),)),
    ),
    "transpose_codes": Op(
        "(Tensor x, Tensor scale, str spec, str spec_t, Tensor? amax=None) -> (Tensor, Tensor)",
        sharding=Rule(
            {"x": Operand("RC"), "scale": Operand("RC", "spec"), "amax": Operand("CR", "spec_t")},
            (Operand("CR"), Operand("CR", "spec_t")),
            needs="amax",
        ),
    ),
}
# They write to buffers that the caller gathers or reduces next, so that nothing is copied.
_SHARDS = {
    "amax_of_shards": Op("(Tensor(a!) amaxes, Tensor[] shards, Tensor places, int[] blocks) -> ()"),
    "quantize_shards": Op(
        "(Tensor(a!) out, Tensor[] shards, Tensor places, Tensor amaxes, str spec, bool transpose, ScalarType rounded) "
        "-> ()",
    ),
}
# Parts of gradients that ranks exchange, by the memory that FSDP2 reduces in.
_GRADIENTS = {
    "quantize_parts": Op("(Tensor x, int parts, int rank) -> Tensor"),
    "sum_in_pairs": Op("(Tensor(a!) out, Tensor parts, float factor) -> ()"),
}
# Several weights in one op, and several ops in one: below autograd, so vmap does not see them.
_CHAIN = "chain"
_LISTS = {
    "quantize_weights": Op("(Tensor x, Tensor[] others, str spec, Tensor[] scales, str? codes=None) -> Tensor[]"),
    _CHAIN: Op("(Tensor x, Tensor[] others, str chain) -> Tensor[]"),
}
# Weights that are stored in 8 bits, stepped in place.
_OPTIMIZERS = {
    "adamw_amax": Op(
        "(Tensor qdata, Tensor scale, Tensor exp_avg, Tensor exp_avg_sq, Tensor grad, Tensor numbers, str spec, "
        "int[] scale_block, int[] place, Tensor? exp_avg_scale=None, Tensor? exp_avg_sq_scale=None) -> Tensor",
    ),
    "adamw": Op(
        "(Tensor(a!) qdata, Tensor(b!) scale, Tensor(c!) exp_avg, Tensor(d!) exp_avg_sq, Tensor grad, Tensor numbers, "
        "Tensor keys, str spec, int[] scale_block, int[] place, bool stochastic, Tensor(e!)? exp_avg_scale=None, "
        "Tensor(f!)? exp_avg_sq_scale=None, Tensor? amax=None) -> ()",
    ),
    "quantize_at_random": Op(
        "(Tensor(a!) qdata, Tensor(b!) scale, Tensor x, Tensor keys, str spec, int[] place) -> ()"
    ),
}
_GEMMS = {
    "scaled_matmul": Op(
        "(Tensor a, Tensor a_scale, str a_spec, Tensor b, Tensor b_scale, str b_spec, "
        # Without a dtype: bfloat16. As the default it would be a number in a graph, which AOTInductor refuses.
        "Tensor? bias=None, str? activation=None, Tensor? residual=None, ScalarType? out_dtype=None, "
        "str accumulation='precise', bool batch_invariant=False) -> Tensor",
        kind=scaled_matmul_kind,
        sharding=Rule(
            {
                "a": Operand("MK"),
                "a_scale": Operand("MK", "a_spec"),
                "b": Operand("NK"),
                "b_scale": Operand("NK", "b_spec"),
                "bias": Operand("N"),
                "residual": Operand("MN"),
            },
            (Operand("MN"),),
            forbids=("bias", "activation", "residual", "batch_invariant"),
        ),
    ),
    "packed_matmul": Op(
        "(Tensor a, Tensor a_scale, str a_spec, Tensor b, Tensor b_scale, str b_spec, "
        "Tensor? bias=None, str? activation=None, Tensor? residual=None, ScalarType? out_dtype=None, "
        "str accumulation='precise', bool batch_invariant=False, Tensor? b_row_scale=None) -> Tensor",
        kind=scaled_matmul_kind,
    ),
    "matmul": Op(
        "(Tensor a, Tensor b, Tensor? bias=None, bool batch_invariant=False) -> Tensor",
        kind=matmul_kind,
        sharding=Rule(
            {"a": Operand("MK"), "b": Operand("NK"), "bias": Operand("N")},
            (Operand("MN"),),
            forbids=("bias", "batch_invariant"),
        ),
    ),
}
# Of groups of tokens, as the experts of a model take them. `offsets` has the end of each group.
_GROUPED = {
    "quantize_groups": Op(f"({_OF}, bool transpose=False, {_ROWS}) -> (Tensor, Tensor)"),
    "quantize_groups_both": Op(
        f"({_OF}, str spec_t, {_ROWS}, Tensor? amax=None, bool codes=False) -> (Tensor, Tensor, Tensor, Tensor)",
    ),
    "transpose_group_codes": Op("(Tensor x, Tensor scale, Tensor offsets, str spec, str spec_t) -> (Tensor, Tensor)"),
    "quantize_matrices": Op("(Tensor x, str spec, bool transpose=False, Tensor? amax=None) -> (Tensor, Tensor)"),
    "quantize_matrices_with_amax": Op("(Tensor x, str spec, str spec_t, bool codes=False) -> (Tensor, Tensor, Tensor)"),
    "scaled_grouped_matmul": Op(
        "(Tensor a, Tensor a_scale, str a_spec, Tensor b, Tensor b_scale, str b_spec, Tensor offsets, "
        "Tensor? bias=None, ScalarType? out_dtype=None, str accumulation='precise', bool batch_invariant=False, "
        # Of groups of columns: the rows that were quantized.
        "SymInt tokens=0) -> Tensor",
        kind=launch.grouped_product_kind,
        contraction=grouped_contraction,
    ),
    "packed_grouped_matmul": Op(
        "(Tensor a, Tensor a_scale, str a_spec, Tensor b, Tensor b_scale, str b_spec, Tensor offsets, "
        "Tensor? bias=None, ScalarType? out_dtype=None, str accumulation='precise', bool batch_invariant=False, "
        "Tensor? b_row_scale=None) -> Tensor",
        kind=packed_groups_kind,
    ),
    "grouped_matmul": Op(
        "(Tensor a, Tensor b, Tensor offsets, Tensor? bias=None) -> Tensor",
        kind=matmul_kind,
    ),
    "grouped_sum": Op("(Tensor x, Tensor offsets) -> Tensor"),
    "swiglu": Op("(Tensor x) -> Tensor"),
    "swiglu_backward": Op("(Tensor grad, Tensor gate_up) -> Tensor"),
    "swiglu_backward_amax": Op(
        "(Tensor grad, Tensor gate_up, Tensor offsets, str spec, str spec_t) -> (Tensor, Tensor)",
    ),
    "sum_of_rows": Op("(Tensor x, Tensor places, Tensor? factors=None) -> Tensor"),
    "routed": Op("(Tensor logits, int top_k, bool normalize) -> (Tensor, Tensor)"),
    "dots_of_rows": Op("(Tensor grad, Tensor x, Tensor places, ScalarType out_dtype) -> Tensor"),
}
# The bits of a row depend on this row (this token and those before it) only, so that training and generation agree.
_ATTENTION = "float scale, int window=0, Tensor? places=None"
_EXACT = {
    "exact_attention": Op(f"(Tensor q, Tensor k, Tensor v, {_ATTENTION}) -> (Tensor, Tensor)"),
    "exact_attention_backward": Op(
        f"(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logsumexp, {_ATTENTION}) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    "rms_norm": Op("(Tensor x, Tensor weight, float eps, bool unit_offset=False) -> (Tensor, Tensor)"),
    "rms_norm_backward": Op(
        "(Tensor grad, Tensor x, Tensor weight, Tensor rstd, bool unit_offset=False) -> (Tensor, Tensor)"
    ),
    "row_logsumexp": Op("(Tensor x, float temperature=1.0) -> Tensor"),
    "gated": Op("(Tensor gate, Tensor up, str activation) -> Tensor"),
    "gated_backward": Op("(Tensor grad, Tensor gate, Tensor up, str activation) -> (Tensor, Tensor)"),
    "rotary_tables": Op("(Tensor positions, Tensor inv_freq, float scaling) -> (Tensor, Tensor)"),
}
_HEALTH = {
    "operand_figures": Op(
        "(Tensor x, Tensor whole, int elements, float limit, Tensor? result=None, Tensor? qdata=None, "
        "Tensor? low=None, Tensor? high=None) -> Tensor",
    ),
}
# Implemented above the ops, in terms of them.
_LAYERS = {
    # torch caches compiled graphs on disk by their text. The last two arguments are there for that text only: without
    # them a stale graph would be used after the dtype of autocast, or the code of the op, has changed.
    "linear": Op(
        "(Tensor input, Tensor weight, Tensor? bias, str recipe, bool shares_input, ScalarType dtype, str code) "
        "-> Tensor"
    ),
    # The recipe is the text of its GEMMs, as `Recipe.args` has it. The cached weight is the result of
    # tritonfp8.functional.quantize_weight: qdata and scale of the weight, then of its transpose.
    "whole_linear": Op(f"(Tensor input, Tensor weight, str recipe, Tensor? bias=None, {_CACHED_WEIGHT}) -> Tensor"),
    "whole_linear_backward": Op(
        "(Tensor grad_output, Tensor input, Tensor weight, str recipe, bool needs_input, bool needs_weight, "
        f"bool needs_bias, {_CACHED_WEIGHT}) -> Tensor[]"
    ),
    "without_backward": Op("(Tensor out, Tensor a, Tensor? b=None, Tensor? c=None, Tensor? d=None) -> Tensor"),
    # grad_output ties the call to backward: without it a compiler may move the read of backward's gather to forward.
    "weight_operand": Op("(Tensor weight, str spec, bool transposed, Tensor? grad_output=None) -> (Tensor, Tensor)"),
    # Returns (qdata, scale, scales of rows) of stored codes of fewer than 8 bits; of 8 bits, (qdata,).
    "packed_operand": Op("(Tensor weight) -> Tensor[]"),
    # Returns (qdata, scale), or only qdata if the scale is given.
    "gathered_operand": Op(
        "(Tensor buffer, Tensor? scale, Tensor tag, int rows, int cols, int above, int left, str spec, "
        "bool transposed, Tensor? grad_output=None) -> Tensor[]"
    ),
    # The same of the weights of experts. `index`: of an orientation.
    "matrices_operand": Op("(Tensor weight, str spec, bool transposed, Tensor? grad_output=None) -> (Tensor, Tensor)"),
    "gathered_matrices": Op(
        "(Tensor codes, Tensor scales, Tensor tag, int experts, int rows, int cols, str spec, int index, "
        "Tensor? grad_output=None) -> (Tensor, Tensor)"
    ),
}
_TABLES = (_CASTS, _SHARDS, _GRADIENTS, _LISTS, _OPTIMIZERS, _GEMMS, _GROUPED, _EXACT, _HEALTH, _LAYERS)
OPS: Mapping[str, Op] = MappingProxyType(
    {
        name: dataclasses.replace(
            op,
            fake=getattr(fakes, name, None),
            reference=getattr(reference, name, None),
            launch=launch.LAUNCHES.get(name),
        )
        for table in _TABLES
        for name, op in table.items()
    }
)
"""Every op of the package by name."""


def implement(name: str, function: Callable[..., Any], backward: Callable[..., Any] | None = None) -> None:
    """Implement an op whose row has no reference.

    Args:
        name: of the op.
        function: takes the arguments of the op.
        backward: ``backward(ctx, *grads)``; ``saved(ctx)`` returns the arguments of the call. None for an op without a
            gradient, or that consists of ops with gradients.
    """
    composite = OPS[name].fake is None
    _library.impl(name, function, "CompositeImplicitAutograd" if composite else "CompositeExplicitAutograd")
    if not composite:
        direct.add(name, overload(name), function, function)
    if backward is not None:
        torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=_save, lib=_library)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, torch.Tensor)))
    # The other arguments, and None in the places of tensors.
    ctx.others = [None if isinstance(x, torch.Tensor) else (x,) for x in inputs]


def saved(ctx: Any) -> list[Any]:
    """The arguments of the call whose ``backward`` runs."""
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if other is None else other[0] for other in ctx.others]


def overload(name: str) -> Any:
    """The op of this name, as torch's dispatcher calls it."""
    return getattr(torch.ops.tritonfp8, name).default


def _register() -> None:
    for name, op in OPS.items():
        _library.define(name + op.schema, tags=(torch.Tag.pt2_compliant_tag,))
        if op.fake is not None:
            torch.library.register_fake(f"{NAMESPACE}::{name}", direct.offered(op.fake), lib=_library)
        _overloads[name] = overload(name)
        if op.reference is not None and name != _CHAIN:
            cpu = op.reference if op.kind is None else counted(op.reference, op.kind, op.contraction)
            cuda = cpu if op.launch is None else on_cuda(op.launch, op.reference, op.kind, op.contraction)
            _library.impl(name, cpu, "CPU")
            _library.impl(name, cuda, "CUDA")
            direct.add(name, overload(name), cpu, cuda, getattr(op.launch, "plannable", None))
        if name not in {**_SHARDS, **_GRADIENTS, **_LISTS, **_OPTIMIZERS, "quantize_into": None}:
            batching.register(f"{NAMESPACE}::{name}", _library)
    run = chained(launch.LAUNCHES[_CHAIN], _overloads)
    for device in ("CPU", "CUDA"):
        _library.impl(_CHAIN, run, device)
    # Modes and profilers see its steps, not the chain.
    direct.add(_CHAIN, overload(_CHAIN), run, run, getattr(launch.LAUNCHES[_CHAIN], "plannable", None), is_seen=False)
    for name, cuda in launch.IN_PLACE.items():
        direct.add_in_place(f"{name}_", overload(name), getattr(reference, name), cuda, _GATE_UP)


_register()
