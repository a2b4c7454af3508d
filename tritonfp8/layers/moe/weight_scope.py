"""The part of :func:`tritonfp8.quantize_weights_once` that is about experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tritonfp8.layers.linear import CachedWeight, raise_changed, register_scope, source_of
from tritonfp8.layers.moe.experts import RoutedExperts
from tritonfp8.layers.moe.grouped_linear import quantize_weights
from tritonfp8.recipes import Recipe


def _parts(module: RoutedExperts) -> dict[str, Tensor] | None:
    """The weights of the experts on this rank, by name; None if FSDP2 shards or a parametrization computes them."""
    weights = module.weights()
    if not all(name in module._parameters for name in weights):
        return None
    if module.dispatch is not None:
        return module.dispatch.parts(weights)
    shared = (hasattr(weight, "_local_tensor") or source_of(weight).has_codes for weight in weights.values())
    return None if any(shared) else weights


def _cached(module: RoutedExperts, name: str, weight: Tensor, recipe: Recipe, dtype: torch.dtype) -> CachedWeight:
    operands = quantize_weights(weight.detach().to(dtype), recipe, torch.is_grad_enabled())

    def stored() -> list[Tensor]:
        parameter: Any = module._parameters[name]
        return [parameter]

    return CachedWeight(dtype, recipe, operands, stored)


@contextmanager
def _experts_scope(model: nn.Module, dtype: torch.dtype | None) -> Iterator[bool]:
    """Experts read cached operands inside the block; at its end their weights are checked."""
    cached: dict[str, CachedWeight] = {}
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, RoutedExperts)]
    try:
        for name, module in modules:
            if module.cached_weights:
                raise ValueError(f"blocks do not nest, and one is open on {name or 'the model'}")
            parts = _parts(module)
            if parts is None:
                continue
            of_module = {}
            for key, weight in parts.items():
                if weight.is_meta:
                    raise TypeError(
                        f"the weights of {name or 'the model'} must have data; got a tensor on meta. Materialize the "
                        "model first."
                    )
                computed_in = dtype
                if dtype is None and torch.is_autocast_enabled(weight.device.type):
                    computed_in = torch.get_autocast_dtype(weight.device.type)
                of_module[key] = _cached(module, key, weight, module.recipe, computed_in or weight.dtype)
                cached[f"{name}.{key}".lstrip(".")] = of_module[key]
            module.cached_weights = of_module
        yield bool(modules)
        if changed := [name for name, each in cached.items() if each.has_changed()]:
            raise_changed(changed)
    finally:
        for each in cached.values():
            each.open = False
        for _, module in modules:
            if any(each in cached.values() for each in module.cached_weights.values()):
                module.__dict__.pop("cached_weights", None)


register_scope(_experts_scope)
