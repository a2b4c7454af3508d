"""Which experts can follow a recipe; give them the class that does, and their own class back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from tritonfp8.layers.in_place import change_class, is_own_forward
from tritonfp8.layers.joined import class_before, joined_class
from tritonfp8.layers.moe.checks import check_recipe
from tritonfp8.layers.moe.experts import ConvertedExperts, RoutedExperts, TransformersExperts, computing_class
from tritonfp8.recipes import Recipe, get
from tritonfp8.specs.formats import HIGH_PRECISION_DTYPES


def why_unfit_experts(module: nn.Module, computes: type[ConvertedExperts], recipe: Recipe | None) -> str | None:
    """The reason why experts for which :func:`computing_class` found a class may not follow ``recipe``, or None."""
    if not is_own_forward(module):
        return "their forward was replaced on the instance: it may compute otherwise"
    try:
        weights = computes.weights(module)  # type: ignore[arg-type]
    except AttributeError as error:
        return f"they have other parameters than their kind has: {error}"
    odd = {name: tuple(weight.shape) for name, weight in weights.items() if weight.ndim != 3}
    if odd or {name for name in weights if name not in module._parameters}:
        return f"their weights are not parameters with three dims each: {odd or ', '.join(weights)}"
    if dtypes := {w.dtype for w in weights.values()} - set(HIGH_PRECISION_DTYPES):
        return f"their weights are {dtypes.pop()}: cast the model to bfloat16, float16 or float32 first"
    if computes is TransformersExperts and (unfit := _why_not_as_transformers(module, weights)):
        return unfit
    try:
        if recipe is not None:
            check_recipe(recipe)
    except ValueError as error:
        return f"recipe {recipe.name!r} does not serve experts: {error}"  # type: ignore[union-attr]
    return None


def _why_not_as_transformers(module: Any, weights: Mapping[str, Tensor]) -> str | None:
    """The reason why experts do not compute by their attributes as experts of transformers do, or None."""
    up, down = (tuple(weight.shape) for weight in weights.values())
    inside = up[1] // 2 if module.has_gate else up[1]
    if up != (down[0], up[1], down[1]) or inside != down[2]:
        return f"their weights do not fit together as [experts, N, K]: {up} and {down}"
    if module.has_bias:
        for name, weight in weights.items():
            bias = module._parameters.get(f"{name}_bias")
            if bias is None or bias.shape != weight.shape[:2]:
                came = "none" if bias is None else tuple(bias.shape)
                return f"their bias {name}_bias must have shape {tuple(weight.shape[:2])}; it has {came}"
    own_gate = module.has_gate and getattr(module._apply_gate, "__name__", "") != "_default_apply_gate"
    return None if own_gate or callable(getattr(module, "act_fn", None)) else "they have no act_fn, the activation"


def convert_experts(module: nn.Module, recipe: Recipe) -> None:
    """Let experts for which :func:`computing_class` finds a class follow ``recipe``, in place."""
    computes = computing_class(module)
    assert computes is not None
    change_class(module, joined_class(computes, type(module), f"Float8{type(module).__name__}"))
    module.recipe = recipe  # type: ignore[assignment]


def experts_before(module: ConvertedExperts) -> type | None:
    """The class that converted experts had, or one that others derived from it since; None if they had no other.

    Raises:
        ValueError: the experts are sharded, or another program wrapped their forward.
        TypeError: the class was written as a subclass of one of this package.
    """
    if isinstance(module, RoutedExperts) and module.dispatch is not None:
        raise ValueError("the experts are sharded over ranks, which only experts with a recipe compute: revert before")
    before = class_before(module)
    if before is not None and not is_own_forward(module):
        raise ValueError(f"torchtitan wrapped the forward of a {type(module).__name__} to shard it: revert before that")
    return before


def revert_experts(module: ConvertedExperts, before: type | None) -> None:
    """Undo :func:`convert_experts`. Experts that had no other class compute in high precision from now on."""
    if before is None:
        module.recipe = get("bf16")
        return
    change_class(module, before)
    module.__dict__.pop("recipe", None)
