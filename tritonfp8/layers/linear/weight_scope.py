"""Quantize weights once for several forward and backward passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tritonfp8.checks import shown
from tritonfp8.formats import HIGH_PRECISION_DTYPES
from tritonfp8.layers.linear.module import Float8Conv1D, Float8Linear, as_matrix, is_converted, require_module
from tritonfp8.layers.linear.operands import Operands, quantize_weight
from tritonfp8.layers.linear.weight_cache import CachedWeight


def _bits(operands: Operands) -> list[Tensor]:
    return [t.view(torch.uint8) for q in operands if q is not None for t in (q.qdata, q.scale.contiguous())]


def _differ(a: Operands, b: Operands) -> Tensor:
    flags = [(x != y).any() for x, y in zip(_bits(a), _bits(b), strict=True)]
    return torch.stack(flags).any()


def _dtype_of(weight: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a layer will compute with this weight."""
    if dtype is None and torch.is_autocast_enabled(weight.device.type):
        dtype = torch.get_autocast_dtype(weight.device.type)
    return weight.dtype if dtype is None else dtype


_Layer = Float8Linear | Float8Conv1D


def _cache(name: str, layer: _Layer, dtype: torch.dtype | None) -> CachedWeight:
    if "weight" not in layer._parameters:
        raise TypeError(
            f"the weight of {name} must be a Parameter; it is computed for each use (parametrized, pruned or "
            "normalized): make that permanent first (remove_parametrizations, prune.remove), or leave out the block"
        )
    weight = layer.weight
    if type(weight.data) is not Tensor or weight.is_meta:
        raise TypeError(
            f"the weight of {name} must be a plain tensor with data; got {type(weight.data).__name__} on "
            f"{weight.device}. Sharded and meta weights are quantized in each pass."
        )
    computed = _dtype_of(weight, dtype)
    operands = quantize_weight(as_matrix(layer, weight.to(computed)), layer.recipe, torch.is_grad_enabled())
    return CachedWeight(weight, computed, layer.recipe, operands)


def _changed(layer: _Layer, cached: CachedWeight) -> Tensor:
    """Whether the layer's weight quantizes to other bits than the cached ones."""
    if not _bits(cached.operands):
        return torch.zeros((), dtype=torch.bool, device=cached.weight.device)
    if layer.weight is not cached.weight:
        return torch.ones((), dtype=torch.bool, device=cached.weight.device)
    both = cached.operands[1] is not None
    now = _differ(
        cached.operands, quantize_weight(as_matrix(layer, cached.weight.to(cached.dtype)), cached.recipe, both)
    )
    return now | cached.differences.any()


def _check_unchanged(layers: Mapping[str, _Layer], of_layer: Mapping[str, CachedWeight]) -> None:
    changed = [_changed(layer, of_layer[name]) for name, layer in layers.items()]
    names = [name for name, flag in zip(layers, changed, strict=True) if flag.item()]
    if names:
        raise RuntimeError(
            f"weights changed inside quantize_weights_once, and passes may have used their old values: "
            f"{', '.join(names)}. Change weights (optimizer.step, load_state_dict) after the block; open a block for "
            "each set of weights that is swapped in (EMA)."
        )


@contextmanager
def quantize_weights_once(model: nn.Module, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Quantize the weights of a converted model once, for every pass inside the ``with`` block.

    For gradient accumulation, where the weights are the same in every micro-batch, and for inference::

        with tritonfp8.quantize_weights_once(model):
            for batch in micro_batches:
                loss(model(batch)).backward()
        optimizer.step()

    The results have the bits that they have without the block. A weight of N x K takes N K bytes and scales until the
    block ends. It takes twice that if gradients are enabled and ``grad_input`` reads other bytes than the transpose of
    the operand of ``output`` (rowwise, 1x32). Compiled layers have one graph inside the block and one outside.

    Weights must not change inside the block. A change that torch counts (in place, another Parameter, other storage) is
    an error at the next eager use. Any other change (``.data``, a kernel of the caller's, all changes in a compiled
    graph) is an error when the block ends: each weight is then quantized again and compared. To catch changes that are
    undone by then, such as EMA weights swapped in by ``.data.copy_``, each use also compares a sample with elements of
    every row and column. Only a change that misses the sample and is undone goes unnoticed. Nothing is cached beyond
    the block, so changes outside it are always seen.

    Args:
        model: a converted model; its weights plain tensors with data.
        dtype: the dtype in which the layers compute. Default: autocast's if it is enabled around the block, else each
            weight's own.

    Raises:
        ValueError: the model has no converted layer, or a scope is open on one already.
        TypeError: a weight is sharded, on the meta device, or no Parameter (parametrized, pruned); or an argument of
            another type.
        RuntimeError: a weight changed inside the block.
    """
    require_module(model)
    if dtype is not None and dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"dtype must be torch.bfloat16, torch.float16, torch.float32 or None; got {shown(dtype)}")
    layers = {name: module for name, module in model.named_modules() if is_converted(module)}
    if not layers:
        raise ValueError("the model has no converted layer: use tritonfp8.convert first")
    if open_already := [name for name, layer in layers.items() if layer.cached_weight is not None]:
        raise ValueError(f"blocks do not nest, and one is open on {', '.join(open_already)}")
    cached: dict[tuple[Any, ...], CachedWeight] = {}
    for name, layer in layers.items():
        # Tied weights share one entry.
        key = (id(layer._parameters.get("weight")), layer.recipe)
        cached[key] = cached.get(key) or _cache(name, layer, dtype)
    of_layer = {name: cached[id(layer.weight), layer.recipe] for name, layer in layers.items()}
    try:
        for name, layer in layers.items():
            layer.cached_weight = of_layer[name]
        yield
        _check_unchanged(layers, of_layer)
    finally:
        for each in cached.values():
            each.open = False
        for layer in layers.values():
            layer.__dict__.pop("cached_weight", None)
