"""Give experts the class that follows a recipe, and their own class back."""

from __future__ import annotations

from torch import nn

from tritonfp8.layers.in_place import change_class, is_own_forward
from tritonfp8.layers.joined import class_before, joined_class
from tritonfp8.layers.moe.experts import ConvertedExperts, RoutedExperts, computing_class
from tritonfp8.recipes import Recipe, get


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
