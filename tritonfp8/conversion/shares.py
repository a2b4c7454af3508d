"""The parameters that no converted layer has, and the share of the linear FLOPs that runs in FP8.

FLOPs count a forward a token: 2 for each element of a matrix that multiplies it. Backward takes twice as much of
every layer, so a training step has the same shares. A conditioning layer counts 0: it reads a row an image.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tritonfp8.conversion.report import HighPrecision
from tritonfp8.conversion.selection import CONDITION, linears
from tritonfp8.layers.linear import Float8Conv1D, Float8Linear, is_converted
from tritonfp8.layers.moe import ConvertedExperts, class_of_experts, is_converted_experts

# The experts of a token, as routers, blocks and configs of transformers and torchtitan name their number.
ACTIVE = ("top_k", "num_experts_per_tok", "moe_top_k", "experts_per_token", "num_experts_per_token")
# Parameters with these in their names are added or looked up.
NO_MATRIX = ("embed", "position", "token", "bias")
_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
LOOKED_UP = "an embedding: its rows are looked up"


class _Count(NamedTuple):
    flops: float
    reason: str
    layer: str | None = None


def coverage(model: nn.Module, skipped: Mapping[str, str]) -> tuple[dict[str, HighPrecision], float | None]:
    """What stays in high precision.

    Args:
        model: after the conversion.
        skipped: the reason for each linear layer and module of experts that was not converted, by name.

    Returns:
        By name each parameter with two dims or more that no converted layer has; and the share of the linear FLOPs that
        runs in FP8, None for a model without any.
    """
    modules = dict(model.named_modules())
    left: dict[str, _Count] = {}
    total = quantized = 0.0
    for name, uses in _uses(modules):
        layers = [layer for use in uses if (layer := _converted(modules, use.path)) is not None]
        # The biases of experts have two dims.
        of = [*layers, *(modules[use.path] for use in uses)]
        if uses[0].parameter.ndim < 2 or any(_is_bias_of_experts(layer, use) for layer in of for use in uses):
            continue
        if layers:
            flops = 2 * uses[0].parameter.numel() * _active(modules, uses[0])[0]
            quantized += flops * layers[0].recipe.quantized_share
            total += flops
        else:
            left[name] = max((_count(modules, use, skipped) for use in uses), key=lambda count: count.flops)
            total += left[name].flops
    share_of = {name: count.flops / total if total else 0.0 for name, count in left.items()}
    found = {name: HighPrecision(round(c.flops), share_of[name], c.reason, c.layer) for name, c in left.items()}
    return found, quantized / total if total else None


def fp8_share(model: nn.Module) -> float | None:
    """``ConversionReport.fp8_share`` by the recipes that the layers have now."""
    return coverage(model, dict.fromkeys(dict(linears(model)), ""))[1]


class _Use(NamedTuple):
    """A parameter in one module."""

    path: str
    key: str
    parameter: Tensor


def _uses(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, list[_Use]]]:
    """Each parameter by its first name, with all modules that have it."""
    found: dict[int, list[_Use]] = {}
    for path, module in modules.items():
        for key, parameter in module._parameters.items():
            # A lazy layer has no shape before its first forward.
            if parameter is not None and not is_lazy(parameter):
                found.setdefault(id(parameter), []).append(_Use(path, key, parameter))
    for uses in found.values():
        yield f"{uses[0].path}.{uses[0].key}".lstrip("."), uses


def _ancestors(path: str) -> Iterator[str]:
    """The path and those around it: a parametrized layer has its parameters in modules inside."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _converted(modules: Mapping[str, nn.Module], path: str) -> Float8Linear | Float8Conv1D | ConvertedExperts | None:
    found = (modules[each] for each in _ancestors(path) if each in modules)
    return next((module for module in found if is_converted(module) or is_converted_experts(module)), None)


def _is_bias_of_experts(layer: nn.Module, use: _Use) -> bool:
    return class_of_experts(layer) is not None and use.parameter.ndim == 2


def _count(modules: Mapping[str, nn.Module], use: _Use, skipped: Mapping[str, str]) -> _Count:
    module, flops = modules[use.path], 2 * use.parameter.numel()
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return _Count(0, LOOKED_UP)
    layer = next((path for path in _ancestors(use.path) if path in skipped), None)
    if layer is not None and skipped[layer].startswith(CONDITION):
        return _Count(0, skipped[layer], layer)
    share, note = _active(modules, use)
    if layer is not None:
        if isinstance(module, nn.Linear) and use.key == "weight":
            # The weights of quantized layers, such as bitsandbytes layers, are packed.
            flops = 2 * module.in_features * module.out_features
        return _Count(flops * share, skipped[layer] + note, layer)
    if isinstance(module, _CONVOLUTIONS):
        return _Count(flops, f"a {type(module).__name__}, counted for one position")
    if _has_experts(module, use.parameter):
        return _Count(flops * share, f"3-D, like experts, in {type(module).__name__}, which is no nn.Linear{note}")
    if isinstance(module, nn.MultiheadAttention):
        return _Count(flops, f"{use.key} of MultiheadAttention, which no layer multiplies by")
    if any(word in use.key.lower() for word in NO_MATRIX) or use.parameter.shape[0] == 1:
        return _Count(0, f"of {type(module).__name__}: added or looked up, by its name and shape")
    return _Count(flops, f"of {type(module).__name__}, which is no nn.Linear")


def _has_experts(module: nn.Module, parameter: Tensor) -> bool:
    return parameter.ndim == 3 and parameter.shape[0] > 1 and not isinstance(module, (nn.Bilinear, *_CONVOLUTIONS))


def _active(modules: Mapping[str, nn.Module], use: _Use) -> tuple[float, str]:
    """The share of the FLOPs of a parameter that a token takes, and what a report says about it.

    A token takes a few experts: of a 3-D parameter ``[experts, ...]``, or of a list of modules named ``experts``.
    """
    parts = use.path.split(".")
    if _has_experts(modules[use.path], use.parameter):
        experts, around = use.parameter.shape[0], use.path
    elif "experts" in parts[:-1] and parts[parts.index("experts") + 1].isdigit():
        around = ".".join(parts[: parts.index("experts") + 1])
        experts = len(modules[around]._modules)
    else:
        return 1.0, ""
    active = _experts_of_a_token(modules, around)
    if active is None or not 0 < active <= experts:
        return 1.0, f"; all {experts} experts counted, as the number that a token takes is not known"
    return active / experts, f"; {active} of {experts} experts a token"


def _experts_of_a_token(modules: Mapping[str, nn.Module], path: str) -> int | None:
    """The number in the module at ``path``, in the block around it, or in a router of that block."""
    block = modules.get(path.rpartition(".")[0])
    near = [modules[path], *([block, *block.children()] if block is not None else [])]
    for holder in (each for module in near for each in (module, getattr(module, "config", None))):
        for name in ACTIVE:
            if type(found := getattr(holder, name, None)) is int:
                return found
    return None
