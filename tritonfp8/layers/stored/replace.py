"""Which layers can have stored weights, and the change of their parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tritonfp8.layers.linear import Float8Conv1D, is_conv1d, is_distributed
from tritonfp8.layers.stored.rows import DTYPES
from tritonfp8.layers.stored.sharding import plain_weight, reshard, sharding, spec_of_weight, stored_part
from tritonfp8.layers.stored.weight import store
from tritonfp8.recipes import Gemm, Recipe
from tritonfp8.specs import QuantSpec


def recipe_of_storage(recipe: Recipe) -> Recipe:
    """``recipe`` with power-of-two scales for the weight: its values are then exact in bfloat16.

    ``tensorwise``, the only built-in recipe with other scales, gets another name by that.
    """
    before = recipe.output.rhs
    if before is None or before.scale_rounding == "pow2":
        return recipe
    after = dataclasses.replace(before, scale_rounding="pow2")

    def changed(gemm: Gemm) -> Gemm:
        return dataclasses.replace(gemm, rhs=after) if gemm.rhs == before else gemm

    return dataclasses.replace(
        recipe,
        name=f"{recipe.name}_stored",
        output=changed(recipe.output),
        grad_input=changed(recipe.grad_input),
    )


def _why_not(layer: nn.Module, recipe: Recipe, owners: Mapping[int, list[str]], on_meta: bool) -> str | None:
    weight = layer._parameters.get("weight")
    if recipe.output.rhs is None:
        return f"recipe {recipe.name!r} computes the output in high precision: leave the layer out by filter="
    if weight is None or parametrize.is_parametrized(layer):
        return "its weight is computed (parametrized or pruned): make that permanent first"
    if type(weight) is not nn.Parameter and not is_distributed(weight):
        return f"its weight is a {type(weight).__name__}, not a plain or a sharded Parameter"
    if is_distributed(weight) and is_conv1d(layer):
        return "it is a Conv1D and its weight is sharded: leave it out by filter="
    if getattr(layer, "on_revert", None) is not None:
        return "enable_float8_all_gather gathers its weight: leave that out, as stored weights are gathered as codes"
    if weight.is_meta and not on_meta:
        return "its weight is on the meta device: load the model first"
    if weight.dtype not in DTYPES:
        return f"its weight is {weight.dtype}: cast the model to bfloat16 or float32 first"
    if len(owners[id(weight)]) > 1:
        return f"its weight is shared by {', '.join(owners[id(weight)])}: leave them out by filter="
    return None


def check_storable(
    model: nn.Module, layers: Mapping[str, nn.Module], recipes: Mapping[str, Recipe], on_meta: bool = False
) -> None:
    """Check that the weight of each layer can be stored; with ``on_meta`` also on the meta device.

    Raises:
        ValueError: it cannot; names the first layers and what to do.
    """
    reshard(layers.values())
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    reasons = {name: _why_not(layer, recipes[name], owners, on_meta) for name, layer in layers.items()}
    if found := [f"{name}: {reason}" for name, reason in reasons.items() if reason is not None]:
        more = f" (and {len(found) - 3} more layers)" if len(found) > 3 else ""
        raise ValueError(f"weights cannot be stored in 8 bits. {'; '.join(found[:3])}{more}")


def check_trainable(layers: Mapping[str, nn.Module]) -> None:
    """Check that the weights of these layers that require a gradient are float32.

    Raises:
        ValueError: one is not; names the layer and what to do.
    """
    for name, layer in layers.items():
        weight = layer.weight
        if weight.requires_grad and weight.dtype != torch.float32:
            raise ValueError(
                f"the weight of {name} requires a gradient and is {weight.dtype}. A weight that is trained in 8 bits "
                "counts as float32: call model.float() first, and compute in bfloat16 by torch.autocast or the "
                "MixedPrecisionPolicy of FSDP2. For frozen weights use requires_grad_(False) or mode='inference'"
            )


def store_weights(layers: Mapping[str, Any], freeze: bool = True) -> None:
    """Replace the weight of each converted layer by a stored one, of the spec that its recipe reads for ``output``.

    With ``freeze`` none requires a gradient; else each does as before. One layer at a time: the memory of a weight is
    free before the next one is quantized.

    Raises:
        RuntimeError: it failed (out of memory) after some layers; these have plain weights again, which are rounded.
    """
    done: list[Any] = []
    for name, layer in layers.items():
        try:
            trained = layer.weight.requires_grad and not freeze
            _put(layer, _stored(layer, layer.weight, layer.recipe.output.rhs), trained)
        except Exception as error:
            for each in done:
                _give_back(each)
            raise RuntimeError(
                f"storing the weight of {name} failed. The {len(done)} layers before it have plain weights again, and "
                "these are rounded: load the model again"
            ) from error
        layer.on_revert, layer.on_reset, layer.on_assign = _give_back, _in_high_precision, _taken
        layer.register_state_dict_post_hook(_write_values)
        layer.register_load_state_dict_pre_hook(_read_values)
        done.append(layer)


def _stored(layer: Any, values: Tensor, spec: QuantSpec) -> Tensor:
    """The stored weight of a layer from values, whole or sharded as these are."""
    if is_distributed(values):
        return sharding().store(layer, values, spec)
    return store(values, spec, isinstance(layer, Float8Conv1D))


def _put(layer: Any, weight: Tensor, requires_grad: bool) -> None:
    """Give a layer another weight."""
    parameter = nn.Parameter(weight, requires_grad)
    if is_distributed(weight):
        sharding().put(layer, parameter)
    else:
        layer._parameters["weight"] = parameter


def _taken(layer: Any, parameter: nn.Parameter) -> nn.Parameter:
    """A Parameter that is assigned, stored: loaders put theirs in the place of weights on the meta device."""
    part = stored_part(layer._parameters.get("weight"))
    alike = part is not None and is_distributed(parameter) == is_distributed(layer._parameters["weight"])
    if part is None or not alike or stored_part(parameter) is not None:
        return parameter
    requires_grad = layer._parameters["weight"].requires_grad
    return nn.Parameter(_stored(layer, parameter.detach(), part.spec), requires_grad)


@contextmanager
def _in_high_precision(layer: Any) -> Iterator[None]:
    """The layer has a plain weight inside the block, for code that initializes it; its values are stored then."""
    reshard([layer])
    stored = layer._parameters["weight"]
    part = stored_part(stored)
    if part is None or stored.is_meta:
        yield
        return
    values = plain_weight(stored)
    layer._parameters["weight"] = nn.Parameter(values, requires_grad=False)
    try:
        yield
    finally:
        layer._parameters["weight"] = stored
    with torch.no_grad():
        stored.copy_(_stored(layer, values, part.spec))


def _write_values(layer: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A state_dict has the values of a stored weight, so that any model can load it."""
    name = f"{prefix}weight"
    if name in state:
        state[name] = plain_weight(state[name])


def _read_values(layer: Any, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *others: object) -> None:
    """Quantize the values of a state_dict where a copy cannot.

    With ``assign=True`` a tensor of the state_dict takes the place of the weight: it must be a stored one. And a copy
    into a shard would know this rank's values only, but scales are those of the whole weight.
    """
    name, before = f"{prefix}weight", layer._parameters["weight"]
    found, part = state.get(name), stored_part(before)
    if part is None or not isinstance(found, Tensor) or stored_part(found) is not None:
        return
    if is_distributed(before) != is_distributed(found) or before.shape != found.shape:
        # torch says what is wrong.
        return
    if metadata.get("assign_to_params_buffers") or is_distributed(before):
        weight = _stored(layer, found.to(before.dtype), part.spec)
        state[name] = nn.Parameter(weight, before.requires_grad)


def _without_hooks(hooks: dict[int, Any], ours: Any) -> dict[int, Any]:
    return {key: hook for key, hook in hooks.items() if getattr(hook, "hook", hook) is not ours}


def _give_back(layer: Any) -> Any:
    """Give a layer a plain weight of the values; returns what undoes that."""
    reshard([layer])
    stored = layer.weight
    names = ("_state_dict_hooks", "_load_state_dict_pre_hooks")
    hooks = {name: dict(getattr(layer, name)) for name in names}
    _put(layer, plain_weight(stored.detach()), stored.requires_grad)
    for name, ours in zip(names, (_write_values, _read_values), strict=True):
        _refill(getattr(layer, name), _without_hooks(hooks[name], ours))

    def undo() -> None:
        _put(layer, stored.detach(), stored.requires_grad)
        for name in names:
            _refill(getattr(layer, name), hooks[name])

    return undo


def _refill(found: dict[int, Any], content: Mapping[int, Any]) -> None:
    found.clear()
    found.update(content)


def check_swap(name: str, layer: Any, recipe: Recipe) -> Recipe:
    """The recipe that a layer with a stored weight follows when ``recipe`` is asked for.

    Raises:
        ValueError: it reads other codes than the stored ones.
    """
    if not is_stored(layer):
        return recipe
    recipe = recipe_of_storage(recipe)
    spec = spec_of_weight(layer._parameters["weight"])
    if recipe.output.rhs != spec:
        raise ValueError(
            f"the weight of {name} is stored as {spec}, and recipe {recipe.name!r} reads "
            f"{recipe.output.rhs}: convert the model again from high precision"
        )
    return recipe


def is_stored(layer: nn.Module) -> bool:
    """Whether the weight of a layer is stored in 8 bits."""
    return stored_part(layer._parameters.get("weight")) is not None


def weight_bytes(model: nn.Module) -> tuple[int, int]:
    """Bytes of the stored weights of a model on this rank, and what the same weights take in their dtype."""
    stored = [part for p in model.parameters() if (part := stored_part(p)) is not None]
    return sum(p.nbytes for p in stored), sum(p.numel() * p.element_size() for p in stored)
