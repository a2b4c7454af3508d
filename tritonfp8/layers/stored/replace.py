"""The change of a model's parameters to stored ones and back, and what its state_dict says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tritonfp8.compat import torch_private
from tritonfp8.layers.extensions import distributed
from tritonfp8.layers.linear import Float8Conv1D, is_distributed
from tritonfp8.layers.stored.base import CodesTensor, carry_marks, replacing
from tritonfp8.layers.stored.matrices import StoredMatrices
from tritonfp8.layers.stored.sharding import plain_weight, reshard, spec_of_weight, stored_part
from tritonfp8.layers.stored.storable import names_of_weights, recipe_of_storage
from tritonfp8.layers.stored.weight import store
from tritonfp8.recipes import Recipe
from tritonfp8.specs import QuantSpec, expands_to


def stored_names(layer: nn.Module) -> list[str]:
    """The parameters of a layer that are stored in 8 bits."""
    return [name for name, parameter in layer._parameters.items() if stored_part(parameter) is not None]


def is_stored(layer: nn.Module) -> bool:
    """Whether a weight of a layer is stored in 8 bits."""
    return bool(stored_names(layer))


def store_weights(layers: Mapping[str, Any], freeze: bool = True) -> None:
    """Replace the weights of each converted layer by stored ones, of its recipe's ``storage``.

    With ``freeze`` none requires a gradient; else each does as before. One weight at a time: the memory of one is free
    before the next one is quantized.

    Raises:
        RuntimeError: it failed (out of memory) after some layers; these have plain weights again, which are rounded.
    """
    done: list[Any] = []
    for name, layer in layers.items():
        try:
            for key in names_of_weights(layer):
                weight = layer._parameters[key]
                requires_grad = weight.requires_grad and not freeze
                _put(layer, key, stored_as_layer(layer, key, weight, layer.recipe.storage), requires_grad)
                # Nothing else may hold the weight in high precision while the next one is quantized.
                del weight
        except Exception as error:
            for each in done:
                _give_back(each)
            if is_stored(layer):
                _put_plain(layer)
            raise RuntimeError(
                f"storing the weight of {name} failed. The {len(done)} layers before it have plain weights again, and "
                "these are rounded: load the model again"
            ) from error
        layer.on_revert, layer.on_reset, layer.on_assign = _give_back, _in_high_precision, taken
        layer.on_move = _moving
        layer.register_state_dict_post_hook(_write_values)
        layer.register_load_state_dict_pre_hook(_read_values)
        done.append(layer)


def stored_as_layer(layer: Any, name: str, values: Tensor, spec: QuantSpec) -> Tensor:
    """The stored weight of a layer from values, whole or sharded as these are."""
    if is_distributed(values):
        return distributed().store(layer, name, values, spec)
    if values.ndim == 3:
        return StoredMatrices.of(values, spec, layer.is_transposed)
    return store(values, spec, isinstance(layer, Float8Conv1D))


def _put(layer: Any, name: str, weight: Tensor, requires_grad: bool) -> None:
    """Give a layer another weight."""
    parameter = replacing(layer._parameters[name], weight, requires_grad)
    if is_distributed(weight):
        distributed().put(layer, name, parameter)
    else:
        layer._parameters[name] = parameter


def _put_plain(layer: Any) -> None:
    for name in stored_names(layer):
        stored = layer._parameters[name]
        _put(layer, name, plain_weight(stored.detach()), stored.requires_grad)


def taken(layer: Any, name: str, parameter: nn.Parameter) -> nn.Parameter:
    """A Parameter that is assigned, stored: loaders put theirs in the place of weights on the meta device."""
    before = layer._parameters.get(name)
    part = stored_part(before)
    if before is None or part is None or is_distributed(parameter) != is_distributed(before):
        return parameter
    if stored_part(parameter) is not None:
        # Loaders make each Parameter require a gradient.
        parameter.requires_grad_(before.requires_grad)
        return parameter
    return replacing(parameter, stored_as_layer(layer, name, parameter.detach(), part.spec), before.requires_grad)


@contextmanager
def _moving(layer: Any, fn: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let ``fn`` of ``Module._apply`` change the stored weights, as torch changes plain ones.

    torch would swap a tensor subclass with its copy. That fails while a graph holds the weight, and the modules before
    this one have been changed by then.
    """
    stored = {name: p for name in stored_names(layer) if not is_distributed(p := layer._parameters[name])}
    with torch.no_grad():
        changed = {name: fn(p) for name, p in stored.items()}
        grads = {name: fn(p.grad) for name, p in stored.items() if p.grad is not None}
    layer._parameters.update(dict.fromkeys(stored))
    try:
        yield
    finally:
        layer._parameters.update(stored)
    for name, before in stored.items():
        now = changed[name]
        if now is before:
            continue
        if not isinstance(now, CodesTensor):
            # Module.to_empty: memory without values.
            now = before.of_values(now)
        if torch_private.can_set_data(before, now):
            before.grad = None
            before.become(now)
        else:
            layer._parameters[name] = before = replacing(before, now, before.requires_grad)
        before.grad = grads.get(name)


@contextmanager
def _in_high_precision(layer: Any) -> Iterator[None]:
    """The layer has plain weights inside the block, for code that initializes it; their values are stored then."""
    reshard([layer])
    stored = {name: p for name in stored_names(layer) if not (p := layer._parameters[name]).is_meta}
    values = {name: plain_weight(weight) for name, weight in stored.items()}
    layer._parameters.update({name: replacing(stored[name], plain, False) for name, plain in values.items()})
    try:
        yield
    finally:
        for name, weight in stored.items():
            carry_marks(weight, layer._parameters[name])
            layer._parameters[name] = weight
    with torch.no_grad():
        for name, weight in stored.items():
            weight.copy_(stored_as_layer(layer, name, values[name], spec_of_weight(weight)))


def _write_values(layer: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A state_dict has the values of a stored weight, so that any model can load it."""
    for name in stored_names(layer):
        if prefix + name in state:
            state[prefix + name] = plain_weight(state[prefix + name])


def _read_values(layer: Any, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *others: object) -> None:
    """Quantize the values of a state_dict where a copy cannot.

    With ``assign=True`` a tensor of the state_dict takes the place of the weight: it must be a stored one. And a copy
    into a shard would know only this rank's values, but scales depend on the whole weight.
    """
    for name in stored_names(layer):
        found, before = state.get(prefix + name), layer._parameters[name]
        if not isinstance(found, Tensor) or stored_part(found) is not None:
            continue
        if is_distributed(before) != is_distributed(found) or before.shape != found.shape:
            # torch says what is wrong.
            continue
        if metadata.get("assign_to_params_buffers") or is_distributed(before):
            weight = stored_as_layer(layer, name, found.to(before.dtype), spec_of_weight(before))
            state[prefix + name] = replacing(found, weight, before.requires_grad)


def _without_hooks(hooks: dict[int, Any], ours: Any) -> dict[int, Any]:
    return {key: hook for key, hook in hooks.items() if getattr(hook, "hook", hook) is not ours}


def _give_back(layer: Any) -> Any:
    """Give a layer plain weights of the values; returns what undoes that."""
    reshard([layer])
    stored = {name: layer._parameters[name] for name in stored_names(layer)}
    names = ("_state_dict_hooks", "_load_state_dict_pre_hooks")
    hooks = {name: dict(getattr(layer, name)) for name in names}
    _put_plain(layer)
    for name, ours in zip(names, (_write_values, _read_values), strict=True):
        _refill(getattr(layer, name), _without_hooks(hooks[name], ours))

    def undo() -> None:
        for name, weight in stored.items():
            _put(layer, name, weight.detach(), weight.requires_grad)
        for name in names:
            _refill(getattr(layer, name), hooks[name])

    return undo


def restore_plain(layer: Any) -> None:
    """Give a layer with stored weights plain ones of their values; its recipe stays."""
    _give_back(layer)
    layer.drop_hooks()


def _refill(found: dict[int, Any], content: Mapping[int, Any]) -> None:
    found.clear()
    found.update(content)


def check_swap(name: str, layer: Any, recipe: Recipe) -> Recipe:
    """The recipe that a layer with a stored weight follows when ``recipe`` is asked for.

    Raises:
        ValueError: it reads other codes than the stored ones.
    """
    if not (stored := stored_names(layer)):
        return recipe
    recipe = recipe_of_storage(recipe)
    spec = spec_of_weight(layer._parameters[stored[0]])
    reads = recipe.output.rhs
    if recipe.storage != spec and (recipe.weights or not (reads and expands_to(spec, reads))):
        raise ValueError(
            f"the weight of {name} is stored as {spec}, and recipe {recipe.name!r} reads "
            f"{recipe.storage}: convert the model again from high precision"
        )
    return recipe


def weight_bytes(model: nn.Module) -> tuple[int, int]:
    """Bytes of the stored weights of a model on this rank, and what the same weights take in their dtype."""
    stored = [part for p in model.parameters() if (part := stored_part(p)) is not None]
    return sum(p.nbytes for p in stored), sum(p.numel() * p.element_size() for p in stored)
