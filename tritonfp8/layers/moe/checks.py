"""Checks of the operands of grouped GEMMs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tritonfp8.layers.codes import refuse_codes
from tritonfp8.layers.linear import raise_without_transpose
from tritonfp8.layers.tensor_types import PLAIN, TENSORS
from tritonfp8.recipes import GEMMS, Recipe
from tritonfp8.specs import check_group_spec
from tritonfp8.specs.checks import check_strided, require_type
from tritonfp8.specs.formats import HIGH_PRECISION_DTYPES
from tritonfp8.specs.quantized import QuantizedGroups

# The GEMMs whose operands hold tokens as rows. The operands of grad_weight hold tokens as columns.
_OF_TOKENS = ("output", "grad_input")


def check_recipe(recipe: Recipe) -> None:
    """Raise ValueError for a recipe whose blocks would have tokens of two groups."""
    for gemm in GEMMS:
        spec = getattr(recipe, gemm).lhs
        if gemm in _OF_TOKENS and spec is not None:
            check_group_spec(spec, "rows")


def _check_plain(tensors: Mapping[str, Tensor | None]) -> None:
    for name, x in tensors.items():
        if x is None:
            continue
        if not torch.compiler.is_compiling() and type(x) not in PLAIN and hasattr(x, "_local_tensor"):
            raise TypeError(
                f"grouped_linear needs plain tensors; got {name} of type {type(x).__name__}. Give it to_local() of a "
                "DTensor that is sharded over experts"
            )
        check_strided(name, x)


def check_routed(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> None:
    """Raise unless each token has as many experts as weights of experts."""
    if not (type(hidden) in TENSORS and type(top_k_index) in TENSORS and type(top_k_weights) in TENSORS):
        check_tensors(**{"hidden states": hidden, "top_k_index": top_k_index, "top_k_weights": top_k_weights})
    if top_k_index.is_floating_point():
        raise TypeError(f"top_k_index must be integers, the experts of each token; got {top_k_index.dtype}")
    shape = (*hidden.shape[:1], *top_k_index.shape[-1:])
    if hidden.ndim != 2 or tuple(top_k_index.shape) != shape or tuple(top_k_weights.shape) != shape:
        raise ValueError(
            "experts need hidden states [T, K], and for each token the indices and the weights of its experts, "
            f"[T, top_k]; got {tuple(hidden.shape)}, {tuple(top_k_index.shape)} and {tuple(top_k_weights.shape)}"
        )


def check_tensors(bias: Tensor | None = None, **tensors: object) -> None:
    """Raise TypeError unless all are tensors; the bias may be None."""
    for name, x in tensors.items():
        require_type(name, x, Tensor, "a torch.Tensor")
    require_type("bias", bias, Tensor | None, "a torch.Tensor or None")


def are_plain(input: object, weight: object, offsets: object, bias: object) -> bool:
    """Whether the operands certainly pass :func:`check_tensors`, at little host time."""
    return type(input) in TENSORS and type(weight) in TENSORS and type(offsets) in TENSORS and type(bias) in PLAIN


def fit_groups(input: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> bool:
    """Whether plain operands certainly pass :func:`check_grouped_linear`, but for the offsets, at little host time."""
    dtype, device = input.dtype, input.device
    if dtype not in HIGH_PRECISION_DTYPES or weight.dtype is not dtype or torch.compiler.is_dynamo_compiling():
        return False
    operands = (input, weight, offsets) if bias is None else (input, weight, offsets, bias)
    for x in operands:
        if x.layout is not torch.strided or x.is_nested or x.device != device:
            return False
    if input.ndim != 2 or weight.ndim != 3 or input.shape[1] != weight.shape[2] or not weight.shape[0]:
        return False
    return bias is None or (bias.dtype is dtype and bias.shape == weight.shape[:2])


def check_grouped_linear(input: Tensor, weight: Tensor, bias: Tensor | None, offsets: Tensor) -> None:
    """Raise unless the operands, after autocast, fit together; :func:`check_offsets` checks the offsets."""
    _check_plain({"input": input, "weight": weight, "bias": bias, "offsets": offsets})
    for name, x in (("weight", weight), ("bias", bias), ("offsets", offsets)):
        if x is not None and x.device != input.device:
            raise ValueError(
                f"grouped_linear needs all tensors on one device; got {name} on {x.device} with input on {input.device}"
            )
    for name, x in (("input", input), ("weight", weight), ("bias", bias)):
        refuse_codes(name, x)
        if x is not None and (x.dtype not in HIGH_PRECISION_DTYPES or x.dtype != input.dtype):
            raise TypeError(
                "grouped_linear needs input, weight and bias of one dtype among bfloat16, float16 and float32; got "
                f"{name} of {x.dtype} with input of {input.dtype}. Cast one, or use torch.autocast."
            )
    if input.ndim != 2 or weight.ndim != 3 or input.shape[1] != weight.shape[2]:
        raise ValueError(
            "grouped_linear needs input [T, K] and weight [E, N, K]; got "
            f"{tuple(input.shape)} and {tuple(weight.shape)}"
        )
    if weight.shape[0] == 0:
        raise ValueError(f"grouped_linear needs one group or more; got weight of shape {tuple(weight.shape)}")
    if bias is not None and tuple(bias.shape) != tuple(weight.shape[:2]):
        raise ValueError(f"bias must have shape {tuple(weight.shape[:2])}; got {tuple(bias.shape)}")


def check_cached(cached: object, weight: Tensor, recipe: Recipe, needs_grad_input: bool) -> None:
    """Raise unless ``cached`` has the operands of a weight of this shape for this recipe."""
    if not isinstance(cached, tuple | list) or len(cached) != 2:
        raise TypeError(
            "quantized_weight must be a pair, the weights quantized untransposed and transposed "
            f"(functional.quantize_matrices), or None; got {type(cached).__name__}"
        )
    experts, n, k = weight.shape
    wanted = (
        ("weight", recipe.output.rhs, (experts, n, k)),
        ("transposed weight", recipe.grad_input.rhs if needs_grad_input else None, (experts, k, n)),
    )
    for (name, spec, shape), q in zip(wanted, cached, strict=True):
        if spec is None:
            continue
        if q is None and name == "transposed weight":
            raise_without_transpose(recipe)
        came = f"{q.spec} of shape {tuple(q.shape)}" if isinstance(q, QuantizedGroups) else type(q).__name__
        if not isinstance(q, QuantizedGroups) or q.spec != spec or tuple(q.shape) != shape:
            raise ValueError(
                f"quantized_weight must hold the {name} as recipe {recipe.name!r} reads it, {spec} of shape {shape}; "
                f"got {came}"
            )


def check_offsets(offsets: Tensor, groups: int, tokens: int) -> None:
    """Raise unless these may be the ends of groups. Their values are read on a CPU only, where nobody waits for them.

    Raises:
        TypeError: another dtype than int32.
        ValueError: another shape; or ends that decrease, begin below 0, or lie beyond the tokens.
    """
    if offsets.dtype != torch.int32:
        raise TypeError(f"offsets must be int32, the end of each group; got {offsets.dtype}")
    if tuple(offsets.shape) != (groups,):
        raise ValueError(f"offsets must have shape ({groups},), the end of each group; got {tuple(offsets.shape)}")
    if torch.compiler.is_compiling() or type(offsets) not in PLAIN or offsets.device.type != "cpu":
        return
    ends = offsets.tolist()
    if ends != sorted(ends) or ends[0] < 0 or ends[-1] > tokens:
        raise ValueError(
            f"offsets must be the ends of adjacent groups: increasing, from 0 to the {tokens} rows of the input; got "
            f"{ends if len(ends) <= 16 else [*ends[:8], '...', *ends[-8:]]}"
        )
