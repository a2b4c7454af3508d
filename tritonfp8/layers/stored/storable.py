"""Which layers can have stored weights, and by which recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tritonfp8.layers.linear import is_conv1d, is_distributed
from tritonfp8.layers.moe import RoutedExperts, class_of_experts
from tritonfp8.layers.stored.base import DTYPES
from tritonfp8.layers.stored.sharding import reshard
from tritonfp8.recipes import Gemm, Recipe
from tritonfp8.specs.formats import BYTE_FORMATS
from tritonfp8.specs.naming import listed, reasons


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


def names_of_weights(layer: nn.Module) -> tuple[str, ...]:
    """The parameters of a layer, or of experts, that can be stored."""
    experts = class_of_experts(layer)
    return ("weight",) if experts is None else tuple(experts.weights(layer))  # type: ignore[arg-type]


def why_experts_stay(layer: nn.Module, freeze: bool) -> str | None:
    """The reason why experts keep their weights in high precision where other weights are stored, or None.

    Args:
        layer: of any kind.
        freeze: whether weights that train are frozen.
    """
    experts = class_of_experts(layer)
    if experts is None:
        return None
    if not issubclass(experts, RoutedExperts):
        return "torchtitan computes them"
    if getattr(layer, "dispatch", None) is not None or any(is_distributed(p) for p in layer._parameters.values()):
        return "they are sharded over ranks: convert the model before"
    if not freeze and any(layer._parameters[name].requires_grad for name in names_of_weights(layer)):  # type: ignore[union-attr]
        return "they train: requires_grad_(False) or mode='inference' lets them be stored"
    return None


def _why_not_weight(
    layer: nn.Module, weight: Tensor | None, owners: Mapping[int, list[str]], on_meta: bool
) -> str | None:
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
        return f"its weight is shared by {listed(owners[id(weight)])}: leave them out by filter="
    return None


def _is_in_bytes(recipe: Recipe) -> bool:
    return recipe.storage is None or recipe.storage.format in BYTE_FORMATS


def _why_not(layer: nn.Module, recipe: Recipe, owners: Mapping[int, list[str]], on_meta: bool) -> str | None:
    if recipe.output.rhs is None:
        how = "leave the layer out by filter=, or swap its recipe before"
        return f"recipe {recipe.name!r} computes the output in high precision: {how}"
    weights = [layer._parameters.get(name) for name in names_of_weights(layer)]
    columns = -2 if is_conv1d(layer) or getattr(layer, "is_transposed", False) else -1
    if not _is_in_bytes(recipe) and any(weight is not None and weight.shape[columns] % 2 for weight in weights):
        return (
            f"{recipe.storage} has two codes a byte, and it has an odd number of in features: leave it out by filter="
        )
    reasons = [_why_not_weight(layer, weight, owners, on_meta) for weight in weights]
    return next((reason for reason in reasons if reason is not None), None)


def check_storable(
    model: nn.Module, layers: Mapping[str, nn.Module], recipes: Mapping[str, Recipe], on_meta: bool = False
) -> None:
    """Check that the weights of each layer can be stored; with ``on_meta`` also on the meta device.

    Raises:
        ValueError: they cannot; names the first layers and what to do.
    """
    reshard(layers.values())
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    found = ((name, _why_not(layer, recipes[name], owners, on_meta)) for name, layer in layers.items())
    if unfit := [(name, reason) for name, reason in found if reason is not None]:
        raise ValueError(f"weights cannot be stored in 8 bits. {'; '.join(reasons(unfit, limit=3))}")


def check_trainable(layers: Mapping[str, nn.Module]) -> None:
    """Check that the weights of these layers that require a gradient can be trained as codes.

    Raises:
        ValueError: one is not float32; names the layer and what to do.
    """
    for name, layer in layers.items():
        weights = [layer._parameters[key] for key in names_of_weights(layer)]
        trained = [weight for weight in weights if weight is not None and weight.requires_grad]
        if trained and trained[0].dtype != torch.float32:
            raise ValueError(
                f"the weight of {name} requires a gradient and is {trained[0].dtype}. A weight that is trained in 8 "
                "bits counts as float32: call model.float() first, and compute in bfloat16 by torch.autocast or the "
                "MixedPrecisionPolicy of FSDP2. For frozen weights use requires_grad_(False) or mode='inference'"
            )
