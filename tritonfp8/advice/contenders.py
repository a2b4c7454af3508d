"""The contenders of a comparison: bf16, each recipe, and a recipe without the layers that it makes slower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from tritonfp8 import recipes
from tritonfp8.advice.blocks import LayerGroup
from tritonfp8.advice.result import BF16
from tritonfp8.conversion import ConversionReport, Recipes, convert
from tritonfp8.recipes import Recipe

# Of the time of all layers, what leaving out slow ones must gain to be tried.
LEAST_SHARE = 0.01


@dataclass(frozen=True, eq=False)
class Contender:
    """A way to convert a model.

    Attributes:
        name: in tables.
        layers: patterns of layers and their recipes; None for bf16.
    """

    name: str
    layers: Mapping[str, Recipe] | None

    def convert(self, model: nn.Module) -> ConversionReport | None:
        """Convert a model or block in place; None for bf16."""
        return None if self.layers is None else convert(model, self.layers)


PLAIN = Contender(BF16, None)


def contender(recipe: Recipes) -> Contender:
    """The contender of a recipe, a name, a file, or a mapping of patterns to recipes."""
    found = recipes.of_layers(recipe) if not isinstance(recipe, Mapping) else recipe
    if isinstance(found, Recipe):
        return Contender(found.name, {"*": found})
    layers = {pattern: recipes.get(each) for pattern, each in found.items()}
    return Contender(" + ".join(dict.fromkeys(each.name for each in layers.values())), layers)


def without_slower(
    each: Contender, times: Mapping[LayerGroup, float], plain: Mapping[LayerGroup, float]
) -> Contender | None:
    """The contender without the layers that it makes slower, or None if that gains too little.

    Args:
        each: converts all layers by one recipe.
        times: seconds of the layers that it converts.
        plain: seconds of the layers in bf16.
    """
    slower = {group for group, seconds in times.items() if seconds > plain[group]}
    gain = sum((times[group] - plain[group]) * group.count for group in slower)
    total = sum(seconds * group.count for group, seconds in times.items())
    if each.layers is None or len(each.layers) > 1 or slower == times.keys() or gain <= LEAST_SHARE * total:
        return None
    (recipe,) = each.layers.values()
    # The first pattern that matches a layer decides, and a longer one matches fewer layers.
    patterns = sorted((group.pattern for group in times if group not in slower), key=len, reverse=True)
    return Contender(f"{each.name} without {len(slower)}", dict.fromkeys(patterns, recipe))
