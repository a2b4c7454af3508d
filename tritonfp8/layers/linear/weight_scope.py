"""Quantize weights once for several forward and backward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tritonfp8.layers import extensions
from tritonfp8.layers.extensions import Extensions, WholeTogether
from tritonfp8.layers.linear.module import ConvertedLayer, as_matrix, is_converted, require_module
from tritonfp8.layers.linear.weight_cache import CachedWeight
from tritonfp8.layers.linear.weight_source import quantize_weight, source_of
from tritonfp8.recipes import Recipe
from tritonfp8.specs.checks import shown
from tritonfp8.specs.formats import HIGH_PRECISION_DTYPES
from tritonfp8.specs.naming import listed

Layers = Mapping[str, ConvertedLayer]


class Weights(NamedTuple):
    """The weights of a module that is no linear layer, to quantize once.

    Attributes:
        name: of the module in its model.
        module: it reads them from its attribute ``cached_weights``, by the names of parameters.
        values: by the names of parameters.
        quantize: ``quantize(values, recipe, needs_grad_input)``.
    """

    name: str
    module: Any
    values: Mapping[str, Tensor]
    quantize: Callable[[Tensor, Recipe, bool], Any]


_finders: list[Callable[[nn.Module], Iterable[Weights]]] = []


def register_finder(find: Callable[[nn.Module], Iterable[Weights]]) -> None:
    """Let :func:`quantize_weights_once` quantize the weights that ``find`` finds in a model, too."""
    _finders.append(find)


def _sharding(layers: Layers) -> Extensions | None:
    """The functions for sharded weights, imported on demand; None if no weight is sharded."""
    kinds = {type(p) for layer in layers.values() for p in layer._parameters.values()}
    bases = {base for layer in layers.values() for base in type(layer).__mro__}
    if any(cls.__module__.startswith("torch.distributed") for cls in kinds | bases):
        return extensions.distributed()
    return extensions.filled()


def _dtype_of(weight: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a layer will compute with this weight."""
    if dtype is None and torch.is_autocast_enabled(weight.device.type):
        dtype = torch.get_autocast_dtype(weight.device.type)
    return weight.dtype if dtype is None else dtype


def _is_parametrized(layer: ConvertedLayer) -> bool:
    return parametrize.is_parametrized(layer, "weight")


def _decides_weight(layer: ConvertedLayer) -> list[Tensor]:
    """The tensors from which the parametrizations of a layer compute its weight."""
    inside = layer.parametrizations.weight  # type: ignore[union-attr]
    return [*inside.parameters(), *inside.buffers()]  # type: ignore[union-attr]


def _computed(name: str, layer: ConvertedLayer) -> Tensor:
    """The weight of a parametrized layer.

    Raises:
        TypeError: computing it changes what the next one is computed from.
    """
    tensors = _decides_weight(layer)
    before = [x.detach().clone() for x in tensors]
    # Grad mode stays: parametrize.cached() would keep a weight that has no gradient.
    weight = layer.weight
    changed = [x for x, old in zip(tensors, before, strict=True) if not torch.equal(x, old)]
    if changed:
        with torch.no_grad():
            for x, old in zip(tensors, before, strict=True):
                x.copy_(old)
        raise TypeError(
            f"the weight of {name} must stay the same for all passes; its parametrization changes it each time that it "
            "computes it, as spectral_norm does in training: leave out the block, or call eval() on the parametrization"
        )
    return weight


def _has_codes(layer: ConvertedLayer) -> bool:
    weight = layer._parameters.get("weight")
    # A sharded weight has codes if its shard does.
    return weight is not None and source_of(getattr(weight, "_local_tensor", weight)).has_codes


def _check_weight(name: str, layer: ConvertedLayer) -> None:
    if "weight" not in layer._parameters and not _is_parametrized(layer):
        raise TypeError(
            f"the weight of {name} must be a Parameter; a hook computes it for each use (pruned, or normalized by a "
            "hook): make that permanent first (prune.remove), use torch.nn.utils.parametrizations, or leave out the "
            "block"
        )


def _check_data(name: str, weight: Tensor) -> None:
    if weight.is_meta:
        raise TypeError(f"the weight of {name} must have data; got a tensor on meta. Materialize the model first.")


def _cache_other(name: str, of: Weights, key: str, dtype: torch.dtype | None) -> CachedWeight:
    """A quantized weight of a module that is no linear layer."""
    weight = of.values[key]
    _check_data(name, weight)
    computed_in = _dtype_of(weight, dtype)
    operands = of.quantize(weight.detach().to(computed_in), of.module.recipe, torch.is_grad_enabled())
    return CachedWeight(computed_in, of.module.recipe, operands, lambda: [of.module._parameters[key]])


def _cache(tied: Layers, dtype: torch.dtype | None, owner: WholeTogether | None) -> CachedWeight:
    """The quantized weight that these layers share."""
    name, layer = next(iter(tied.items()))
    parametrized = _is_parametrized(layer)
    weight = _computed(name, layer) if parametrized else layer.weight
    _check_weight(name, layer)
    _check_data(name, weight)
    computed_in = _dtype_of(weight, dtype)
    needs = torch.is_grad_enabled()
    matrix = as_matrix(layer, weight.detach().to(computed_in))
    if type(matrix) is Tensor:
        operands: Any = quantize_weight(matrix, layer.recipe, needs)
    elif (sharding := _sharding(tied)) is not None and not parametrized:
        operands = sharding.quantize(matrix, layer.recipe, needs)
    else:
        raise TypeError(f"the weight of {name} must be a plain tensor or a DTensor; got {type(weight.data).__name__}")

    def stored() -> Sequence[Tensor]:
        if owner is not None:
            return owner.stored(layer)
        if parametrized:
            return _decides_weight(layer)
        weights = [each.weight for each in tied.values()]
        return list({id(w): w for w in weights}.values())

    return CachedWeight(computed_in, layer.recipe, operands, stored, weight.detach() if parametrized else None)


def _cache_all(layers: Layers, dtype: torch.dtype | None, owner: WholeTogether | None) -> dict[str, CachedWeight]:
    """The quantized weight of each layer; tied weights share one."""
    tied: dict[tuple[Any, ...], dict[str, ConvertedLayer]] = {}
    for name, layer in layers.items():
        tied.setdefault((id(layer._parameters.get("weight", layer)), layer.recipe), {})[name] = layer
    return {name: cached for group in tied.values() for cached in [_cache(group, dtype, owner)] for name in group}


def _check_unchanged(cached: Mapping[str, CachedWeight]) -> None:
    changed = {id(each): each.has_changed() for each in cached.values()}
    names = [name for name, each in cached.items() if changed[id(each)]]
    if names:
        raise_changed(names)


def raise_changed(names: Sequence[str]) -> None:
    """Raise RuntimeError for layers whose weights changed inside a block."""
    raise RuntimeError(
        f"weights changed inside quantize_weights_once, and passes may have used their old values: "
        f"{listed(names)}. Change weights (optimizer.step, load_state_dict) after the block; open a block for "
        "each set of weights that is swapped in (EMA)."
    )


@contextmanager
def _cached(layers: Layers, others: Sequence[Weights], dtype: torch.dtype | None) -> Iterator[None]:
    """The layers read cached operands inside the block; at its end their weights are checked."""
    sharding = _sharding(layers)
    groups = [] if sharding is None else sharding.whole_together(layers)
    cached: dict[str, CachedWeight] = {}
    alone = {name: layer for name, layer in layers.items() if not any(name in group.layers for group in groups)}
    with ExitStack() as stack:
        for group in [WholeTogether(alone, nullcontext, lambda layer: []), *groups]:
            if group.keeps_codes is not None:
                stack.enter_context(group.keeps_codes())
                continue
            with group.whole():
                cached |= _cache_all(group.layers, dtype, None if group.layers is alone else group)
        read: dict[Any, tuple[str, Any]] = {layers[name]: ("cached_weight", each) for name, each in cached.items()}
        for of in others:
            names = {key: f"{of.name}.{key}".lstrip(".") for key in of.values}
            found = {key: _cache_other(name, of, key, dtype) for key, name in names.items()}
            cached |= {name: found[key] for key, name in names.items()}
            read[of.module] = ("cached_weights", found)
        try:
            for module, (attribute, value) in read.items():
                setattr(module, attribute, value)
            yield
            _check_unchanged(cached)
        finally:
            for each in cached.values():
                each.open = False
            for module, (attribute, _) in read.items():
                module.__dict__.pop(attribute, None)


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

    Sharded weights: with tensor parallelism a rank caches its part. With FSDP2 and
    ``distributed.enable_float8_all_gather`` each rank caches the codes that it sends, N K / ranks bytes. With plain
    FSDP2 each rank caches whole weights: N K bytes for each, not a shard of it; opening the block gathers them once
    more. All ranks must open and close the block together. Parametrized weights (``torch.nn.utils.parametrizations``)
    are still computed in each pass, for autograd, but not quantized.

    Weights that are stored in 8 bits are left as they are. Experts of torchtitan, and experts that
    FSDP2 shards, quantize their weights in each pass.

    Weights must not change inside the block. A change that torch counts (in place, another Parameter, other storage) is
    an error at the next eager use; codes that FSDP2 gathers are made again instead. Any other change (``.data``, a
    kernel of the caller's, all changes in a compiled graph) is an error when the block ends: the sums of the bits of
    each row and column are then compared. To catch changes that are undone by then, such as EMA weights swapped in by
    ``.data.copy_``, each use also compares a sample with elements of every row and column. Only a change that misses
    the sample and is undone goes unnoticed. Nothing is cached beyond the block, so changes outside it are always seen.

    Args:
        model: a converted model whose weights have data. Under FSDP2 it may be a part of a sharded model.
        dtype: the dtype in which the layers compute. Default: autocast's if it is enabled around the block, else each
            weight's own.

    Raises:
        ValueError: the model has no converted layer, or a scope is open on one already.
        TypeError: a weight is on the meta device, or computed by a hook (pruned), or its parametrization changes it in
            each pass (``spectral_norm`` in training); or an argument of another type.
        RuntimeError: a weight changed inside the block.
    """
    require_module(model)
    if dtype is not None and dtype not in HIGH_PRECISION_DTYPES:
        raise TypeError(f"dtype must be torch.bfloat16, torch.float16, torch.float32 or None; got {shown(dtype)}")
    layers = {name: module for name, module in model.named_modules() if is_converted(module)}
    others = [weights for find in _finders for weights in find(model)]
    if not layers and not others:
        raise ValueError("the model has no converted layer: use tritonfp8.convert first")
    layers = {name: layer for name, layer in layers.items() if not _has_codes(layer)}
    open_already = [name for name, layer in layers.items() if layer.cached_weight is not None]
    if open_already := open_already + [of.name or "the model" for of in others if of.module.cached_weights]:
        raise ValueError(f"blocks do not nest, and one is open on {listed(open_already)}")
    with _cached(layers, others, dtype):
        yield
