"""convert, swap_recipe, revert: change how a model's linear layers compute, in place.

A layer is converted by changing its class. The module object, its parameters, buffers, hooks and all references to it
stay, so existing optimizers, tied weights and hooks keep working.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from tritonfp8.checks import require_flag
from tritonfp8.functional import SharedInput
from tritonfp8.layers import all_or_nothing, change_class, is_own_forward, rebase, swapping
from tritonfp8.layers.linear import Float8Linear, require_module
from tritonfp8.recipes import Recipe, get

MIN_FEATURES = 16

Recipes = str | Recipe | Mapping[str, str | Recipe]
Filter = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class ConversionReport:
    """The result of a conversion; ``str(report)`` is a table.

    Attributes:
        converted: the recipe of each converted layer, by fully qualified name.
        skipped: for each other linear layer, the reason why it was not converted.
        fused: for each fused norm and MLP, a description of the fused module.
        not_fused: for each other norm and MLP, the reason why it was not fused; empty without ``fuse=True``.
    """

    converted: dict[str, Recipe]
    skipped: dict[str, str]
    fused: dict[str, str] = field(default_factory=dict)
    not_fused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [(name, recipe.name) for name, recipe in self.converted.items()]
        rows += [(name, f"skipped: {reason}") for name, reason in self.skipped.items()]
        rows += [(name, f"fused: {what}") for name, what in self.fused.items()]
        rows += [(name, f"not fused: {reason}") for name, reason in self.not_fused.items()]
        width = max((len(name) for name, _ in rows), default=0)
        lines = [f"{name:<{width}}  {what}" for name, what in rows]
        total = f"{len(self.converted)} converted, {len(self.skipped)} skipped"
        if self.fused or self.not_fused:
            total += f", {len(self.fused)} fused, {len(self.not_fused)} not fused"
        return "\n".join([*lines, total])


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name, module


def _why_unfit(module: nn.Linear) -> str | None:
    """The reason why a layer cannot be converted, or None."""
    if type(module) is nn.Linear:
        return None if is_own_forward(module) else "its forward was replaced on the instance: it may compute otherwise"
    if nn.utils.parametrize.is_parametrized(module):
        return "parametrized: its weight is computed and not a parameter"
    return f"a subclass of nn.Linear ({type(module).__name__}), which may compute something else"


def _default_reason(module: nn.Linear) -> str | None:
    small = [
        f"{name}={value}" for name in ("in_features", "out_features") if (value := getattr(module, name)) < MIN_FEATURES
    ]
    return f"{' and '.join(small)} below {MIN_FEATURES}" if small else None


def _skip_reason(module: nn.Linear, name: str, filter: Filter | None) -> str | None:
    if reason := _why_unfit(module):
        return reason
    if filter is None:
        return _default_reason(module)
    return None if filter(module, name) else "the filter returned False"


def _check_filter(filter: object) -> None:
    if filter is not None and not callable(filter):
        raise TypeError(f"filter must be a function of a module and its name, or None; got {type(filter).__name__}")


class _Choice:
    """Chooses the recipe of each layer by its name, and remembers which patterns matched."""

    def __init__(self, recipe: Recipes) -> None:
        self.recipes = {p: get(r) for p, r in recipe.items()} if isinstance(recipe, Mapping) else {"*": get(recipe)}
        self.is_mapping = isinstance(recipe, Mapping)
        self.used: set[str] = set()
        if not self.recipes:
            raise ValueError("the mapping of patterns to recipes is empty: name at least one pattern")

    def of(self, name: str) -> Recipe | None:
        for pattern, recipe in self.recipes.items():
            if fnmatchcase(name, pattern):
                self.used.add(pattern)
                return recipe
        return None

    def check_all_used(self, names: list[str]) -> None:
        unused = [p for p in self.recipes if p not in self.used]
        if unused and self.is_mapping:
            raise ValueError(
                f"{', '.join(map(repr, unused))} decided the recipe of no layer: it matches none, or an earlier "
                f"pattern matches them all (the first match wins). Layers: {', '.join(names) or 'none'}"
            )


def _share_inputs(model: nn.Module, layers: Collection[nn.Module]) -> None:
    """Let sibling layers (one parent, equal ``in_features``) quantize an input once that all of them read."""
    for parent in model.modules():
        groups: dict[int, list[nn.Module]] = {}
        for child in parent.children():
            if child in layers:
                groups.setdefault(child.in_features, []).append(child)  # type: ignore[arg-type]
        for siblings in groups.values():
            if len(siblings) > 1:
                for child, shared in zip(siblings, SharedInput.group(len(siblings)), strict=True):
                    child.shared_input = shared  # type: ignore[assignment]


def _fusing() -> Any:
    """The folder of fused layers, imported on first use: models without fused layers do not need it."""
    from tritonfp8.layers import fused

    return fused


def _is_fused(model: nn.Module) -> bool:
    return any("fused_from" in module.__dict__ or "is_fused" in module.__dict__ for module in model.modules())


def _recipes_of_norms(model: nn.Module, recipes: Mapping[Any, Recipe]) -> list[tuple[Any, Recipe]]:
    """The fused norms of ``model``, each with the recipe of the linear layers that read it."""
    return _fusing().recipes_of_norms(model, recipes.__getitem__) if _is_fused(model) else []


def _unshare_inputs(model: nn.Module) -> None:
    for module in model.modules():
        module.__dict__.pop("shared_input", None)


def convert(model: nn.Module, recipe: Recipes, filter: Filter | None = None, fuse: bool = False) -> ConversionReport:
    """Make the model's linear layers follow a recipe, in place.

    Every ``nn.Parameter`` object and every key of the state_dict stays, as do hooks and references to the layers. The
    model may be on the meta device. Nothing is changed if an error is raised.

    Args:
        model: any module; it may be an ``nn.Linear`` itself.
        recipe: a name, a :class:`~tritonfp8.Recipe`, or a mapping of shell-style patterns of fully qualified names
            (``"*.mlp.*"``) to either; the first pattern that matches decides, and layers that none matches are skipped.
        filter: ``filter(module, fqn) -> bool``, whether to convert an ``nn.Linear``. By default layers with fewer than
            16 in or out features are skipped. Subclasses of ``nn.Linear`` are never converted: their forward may
            differ, or the module around them may bypass it. Layers whose forward was replaced on the instance are not
            converted either, unless the hooks of accelerate replaced it.
        fuse: also fuse quantization into SwiGLU MLPs, and into norms that only linear layers of one recipe read, where
            :func:`tritonfp8.layers.fused.fuse_model` recognizes them. The report lists the others with reasons. Sharded
            weights (tensor parallel) need ``fuse=False``.

    Returns:
        A :class:`ConversionReport`.

    Note:
        In eval mode ``nn.TransformerEncoderLayer`` may run torch's fused path, which reads the weights of its linear
        layers and skips their forward: ``torch.backends.mha.set_fastpath_enabled(False)`` keeps them on their recipe.

    Raises:
        ValueError: the model is already converted, nothing was converted, a pattern decided no layer, unknown recipe.
        TypeError: an argument of another type.
    """
    require_module(model)
    require_flag("fuse", fuse)
    _check_filter(filter)
    choice = _Choice(recipe)
    converted: dict[str, Recipe] = {}
    skipped: dict[str, str] = {}
    modules: dict[str, nn.Linear] = {}
    for name, module in _linears(model):
        if isinstance(module, Float8Linear):
            raise ValueError(
                f"{name or 'the model'} is converted already: use tritonfp8.swap_recipe to change the recipe, or "
                "tritonfp8.revert first"
            )
        reason = _skip_reason(module, name, filter)
        chosen = None if reason else choice.of(name)
        if reason or chosen is None:
            skipped[name] = reason or "no pattern matched"
        else:
            converted[name], modules[name] = chosen, module
    choice.check_all_used([*modules, *(n for n, r in skipped.items() if r == "no pattern matched")])
    if not converted:
        report = ConversionReport(converted, skipped)
        raise ValueError(f"nothing was converted: {'the model has no nn.Linear' if not skipped else report}")
    with all_or_nothing(model):
        for name, module in modules.items():
            change_class(module, Float8Linear)
            module.recipe = converted[name]  # type: ignore[assignment]
        fused, left = _fusing().fuse_model(model) if fuse else ({}, {})
        _share_inputs(model, set(modules.values()))
    return ConversionReport(converted, skipped, fused, left)


def swap_recipe(model: nn.Module, recipe: Recipes) -> ConversionReport:
    """Change the recipe of a converted model's layers, in place. Parameters stay; an equal recipe recompiles nothing.

    A backward follows the recipe of its forward, also if activation checkpointing recomputes that forward.

    Args:
        model: a converted model.
        recipe: as for :func:`convert`. Layers that no pattern matches keep their recipe; the report lists them as
            skipped.

    Raises:
        ValueError: the model has no converted layer, a pattern decided no layer, an unknown recipe, or different
            recipes for the linear layers of one fused norm or MLP.
        TypeError: an argument of another type.
    """
    require_module(model)
    choice = _Choice(recipe)
    layers = {name: module for name, module in _linears(model) if isinstance(module, Float8Linear)}
    if not layers:
        raise ValueError("the model has no converted layer: use tritonfp8.convert first")
    chosen = {name: choice.of(name) for name in layers}
    choice.check_all_used(list(layers))
    new_recipes = {module: chosen[name] or module.recipe for name, module in layers.items()}
    norms = _recipes_of_norms(model, new_recipes)
    with all_or_nothing(model):
        for norm, new in norms:
            if new != norm.recipe:
                swapping(norm)
                norm.recipe = new
        for module in layers.values():
            # An equal recipe keeps its object, so that compiled code which guards on it stays valid.
            if new_recipes[module] != module.recipe:
                swapping(module)
                module.recipe = new_recipes[module]
    return ConversionReport(
        {name: recipe for name, recipe in chosen.items() if recipe is not None},
        {name: "no pattern matched" for name, recipe in chosen.items() if recipe is None},
    )


@contextmanager
def _released(layers: Iterable[Float8Linear]) -> Iterator[None]:
    """Call ``on_revert`` of each layer; undo the calls if one of them, or the block, raises."""
    undo: list[Callable[[], object]] = []
    try:
        for layer in layers:
            if layer.on_revert is not None:
                undone = layer.on_revert(layer)
                if callable(undone):
                    undo.append(undone)
        yield
    except BaseException:
        for each in reversed(undo):
            each()
        raise


def revert(model: nn.Module) -> list[str]:
    """Undo :func:`convert`, in place: layers and fused modules get back their classes and keep their parameters.

    If other code derived a class from a layer's class in the meantime, the layer gets a class derived from
    ``nn.Linear`` instead: ``FSDPFloat8Linear``, which ``fully_shard`` makes, becomes ``FSDPLinear``. Nothing is changed
    if an error is raised.

    Returns:
        The names of the reverted layers, then of the fused modules.

    Raises:
        ValueError: the model has no converted layer, or a block of ``quantize_weights_once`` is open on one.
        TypeError: ``model`` is not a module, or a layer's class was written as a subclass of :class:`Float8Linear`.
    """
    require_module(model)
    layers = {name: module for name, module in _linears(model) if isinstance(module, Float8Linear)}
    if not layers:
        raise ValueError("the model has no converted layer: there is nothing to revert")
    if cached := [name for name, module in layers.items() if module.cached_weight is not None]:
        raise ValueError(f"quantize_weights_once is open on {', '.join(cached)}: revert after the block")
    classes = {module: rebase(type(module), Float8Linear, nn.Linear) for module in layers.values()}
    with all_or_nothing(model), _released(layers.values()):
        for module, cls in classes.items():
            change_class(module, cls)
            for name in ("recipe", "on_revert"):
                module.__dict__.pop(name, None)
        _unshare_inputs(model)
        return [*layers, *(_fusing().unfuse_model(model) if _is_fused(model) else [])]
