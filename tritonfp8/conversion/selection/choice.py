"""Recipes by patterns of names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType

from tritonfp8 import recipes
from tritonfp8.recipes import Recipe, get, of_layers
from tritonfp8.specs.naming import listed, reasons

Recipes = str | Recipe | Mapping[str, str | Recipe]


class Choice:
    """Chooses the recipe of each layer by its name, and remembers which patterns matched.

    Args:
        recipe, batch_invariant: the arguments of :func:`tritonfp8.convert`.

    Raises:
        ValueError: an unknown recipe, one that cannot be batch-invariant, or a mapping without patterns.
        TypeError: an argument of another type. If the recipe is missing, the message lists all recipes.
    """

    def __init__(self, recipe: Recipes | None, batch_invariant: bool = False) -> None:
        if recipe is None:
            raise TypeError(
                f'a recipe is needed, such as "rowwise", the first to try. The recipes:\n{recipes.summary()}\n'
                "Or give a tritonfp8.Recipe, the path of a .toml file, or a mapping of patterns of layer names to these"
            )
        if not isinstance(recipe, Mapping):
            recipe = of_layers(recipe)
        if isinstance(recipe, Mapping):
            self.recipes = {pattern: get(each, batch_invariant=batch_invariant) for pattern, each in recipe.items()}
        else:
            self.recipes = {"*": get(recipe, batch_invariant=batch_invariant)}
        self.is_mapping = isinstance(recipe, Mapping)
        self.used: set[str] = set()
        if not self.recipes:
            raise ValueError("the mapping of patterns to recipes is empty: name at least one pattern")
        check_patterns(self.recipes)

    def find(self, name: str) -> tuple[str, Recipe] | None:
        """The first pattern that matches ``name``, and its recipe."""
        return next(((p, recipe) for p, recipe in self.recipes.items() if fnmatchcase(name, p)), None)

    def of(self, name: str) -> Recipe | None:
        """The recipe of ``name``; its pattern counts as used."""
        found = self.find(name)
        if found is None:
            return None
        self.used.add(found[0])
        return found[1]

    def check_all_used(self, names: Iterable[str], skipped: Mapping[str, str] = MappingProxyType({})) -> None:
        """Raise ValueError if a pattern decided nothing.

        Args:
            names: all names that a pattern can match.
            skipped: the reasons for the layers that are left out.
        """
        unused = [pattern for pattern in self.recipes if pattern not in self.used]
        if unused and self.is_mapping:
            raise ValueError(
                f"{', '.join(map(repr, unused))} decided the recipe of no layer: it matches none, or an earlier "
                f"pattern matches them all (the first match wins). Layers: {listed(names) or 'none'}"
                f"{why_skipped(unused, skipped)}"
            )


def check_patterns(patterns: Iterable[object]) -> None:
    """Raise TypeError unless all patterns are of type str."""
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"a pattern of layer names must be a str; got {type(pattern).__name__}")


def why_skipped(patterns: Collection[str], skipped: Mapping[str, str]) -> str:
    """The reasons for layers that these patterns match and that are left out all the same, as the end of a message."""
    named = ((n, reason) for n, reason in skipped.items() if any(fnmatchcase(n, pattern) for pattern in patterns))
    return "".join(f"; {line}" for line in reasons(named, limit=3))


def names_part(pattern: str, part: str) -> bool:
    """Whether a pattern has this part of a layer's name: ``"*.mlp.*"`` and ``"*"`` do not name ``gate``."""
    pieces = (piece for piece in pattern.split(".") if any(map(str.isalnum, piece)))
    return any(fnmatchcase(part, piece) for piece in pieces)
