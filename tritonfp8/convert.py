"""convert, swap_recipe, revert: change how a model's linear layers compute, in place.

A layer is converted by changing its class: the module object, its parameters, buffers, hooks and every reference to it
stay, so optimizers, tied weights and hooks made before go on working.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from tritonfp8.functional import SharedInput
from tritonfp8.layers import all_or_nothing, change_class, is_own_forward, rebase, swapping
from tritonfp8.layers.linear import Float8Linear, require_module
from tritonfp8.recipes import Recipe, get
from tritonfp8.specs import require_flag

MIN_FEATURES = 16

Recipes = str | Recipe | Mapping[str, str | Recipe]
Filter = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did; ``str(report)`` is a table.

    Attributes:
        converted: the recipe of each layer that now follows one, by fully qualified name.
        skipped: for each other linear layer, why it was left as it was.
        fused: what each fused norm and MLP is now, by fully qualified name.
        not_fused: for each other norm and MLP, why it was left as it was, if fusing was asked for.
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
    """Why a layer cannot be converted at all, or None."""
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
    """Which recipe a name gets, and which patterns were of use."""

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
                f"{', '.join(map(repr, unused))} decided the recipe of no layer: it matches none, or an earlier one "
                f"takes them all (the first match wins). Layers: {', '.join(names) or 'none'}"
            )


def _share_inputs(model: nn.Module, layers: Collection[nn.Module]) -> None:
    """Let layers with one parent and as many in features quantize once what they all read."""
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
    """The folder of fused layers: imported for models that have them, which the others do without."""
    from tritonfp8.layers import fused

    return fused


def _is_fused(model: nn.Module) -> bool:
    return any("fused_from" in module.__dict__ or "is_fused" in module.__dict__ for module in model.modules())


def _recipes_of_norms(model: nn.Module, recipes: Mapping[Any, Recipe]) -> list[tuple[Any, Recipe]]:
    """Each fused norm of ``model`` with the recipe of its linears."""
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
        filter: ``filter(module, fqn) -> bool``, whether to convert an ``nn.Linear``. The default converts all but those
            with fewer than 16 in or out features. Subclasses of ``nn.Linear`` are never converted: their forward may
            differ, or be bypassed by the module around them. Nor are layers whose forward was replaced on the instance,
            other than by the hooks of accelerate.
        fuse: also let SwiGLU MLPs, and norms that only linears of one recipe read, hand 8 bits on: what
            :func:`tritonfp8.layers.fused.fuse_model` is sure of. The report says what was left and why. Sharded weights
            (tensor parallel) need ``fuse=False``.

    Returns:
        A :class:`ConversionReport`.

    Note:
        In eval mode ``nn.TransformerEncoderLayer`` may run torch's fused path, which reads its linears' weights and not
        their forward: ``torch.backends.mha.set_fastpath_enabled(False)`` keeps them on their recipe.

    Raises:
        ValueError: the model is converted already, nothing was converted, a pattern decided no layer, or an unknown
        recipe. TypeError: an argument of another type.
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

    A backward follows its forward's recipe, also where activation checkpointing runs that forward again.

    Args:
        model: a converted model.
        recipe: as for :func:`convert`; layers that no pattern matches keep theirs, and the report calls them skipped.

    Raises:
        ValueError: the model has no converted layer, a pattern decided no layer, an unknown recipe, or different ones
        for the linears of a fused norm or MLP. TypeError: an argument of another type.
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
            # The same object where the recipe is equal: whatever was compiled for it stays valid.
            if new_recipes[module] != module.recipe:
                swapping(module)
                module.recipe = new_recipes[module]
    return ConversionReport(
        {name: recipe for name, recipe in chosen.items() if recipe is not None},
        {name: "no pattern matched" for name, recipe in chosen.items() if recipe is None},
    )


@contextmanager
def _released(layers: Iterable[Float8Linear]) -> Iterator[None]:
    """Call what the layers have to do before they are reverted, and undo it if that, or the block, raises."""
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
    """Undo :func:`convert`, in place: all layers and fused modules are what they were, with the same parameters.

    Classes that others derived since from a layer's own are derived from ``nn.Linear`` then: of ``FSDPFloat8Linear``,
    which ``fully_shard`` makes, becomes ``FSDPLinear``. Nothing is changed if an error is raised.

    Returns:
        The names of the layers that were changed back, then of the fused modules.

    Raises:
        ValueError: the model has no converted layer, or a block of ``quantize_weights_once`` is open on one.
        TypeError: ``model`` is no module, or a layer is of a class that was written as a subclass of
            :class:`Float8Linear`.
    """
    require_module(model)
    layers = {name: module for name, module in _linears(model) if isinstance(module, Float8Linear)}
    if not layers:
        raise ValueError("the model has no converted layer: there is nothing to revert")
    if held := [name for name, module in layers.items() if module.cached_weight is not None]:
        raise ValueError(f"quantize_weights_once is open on {', '.join(held)}: revert after the block")
    classes = {module: rebase(type(module), Float8Linear, nn.Linear) for module in layers.values()}
    with all_or_nothing(model), _released(layers.values()):
        for module, cls in classes.items():
            change_class(module, cls)
            for name in ("recipe", "on_revert"):
                module.__dict__.pop(name, None)
        _unshare_inputs(model)
        return [*layers, *(_fusing().unfuse_model(model) if _is_fused(model) else [])]
