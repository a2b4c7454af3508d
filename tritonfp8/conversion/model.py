"""convert, swap_recipe, revert: change how a model's linear layers and experts compute, in place.

A layer is converted by changing its class. The module object, its parameters, buffers, hooks and all references to it
stay, so existing optimizers, tied weights and hooks keep working.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from tritonfp8.conversion.others import keep_layers, teach_counters
from tritonfp8.conversion.report import ConversionReport
from tritonfp8.conversion.selection import (
    NO_PATTERN,
    Choice,
    Filter,
    Recipes,
    Selected,
    converted,
    converted_experts,
    converted_layers,
    select,
)
from tritonfp8.conversion.shares import coverage
from tritonfp8.conversion.sharing import share_inputs, unshare_inputs
from tritonfp8.layers import (
    all_or_nothing,
    change_class,
    class_before,
    forget_names,
    is_own_forward,
    joined_class,
    joined_of,
    record_names,
    swapping,
)
from tritonfp8.layers.linear import (
    Float8Conv1D,
    Float8Linear,
    is_conv1d,
    require_module,
)
from tritonfp8.layers.moe import (
    ConvertedExperts,
    check_recipe,
    computing_class,
    convert_experts,
    experts_before,
    is_converted_experts,
    revert_experts,
)
from tritonfp8.recipes import Recipe
from tritonfp8.specs.checks import require, require_flag
from tritonfp8.specs.naming import listed

__all__ = ["ConversionReport", "apply_selection", "convert", "for_storage", "revert", "swap_recipe"]

_Layer = Float8Linear | Float8Conv1D


def convert(
    model: nn.Module,
    recipe: Recipes | None = None,
    filter: Filter | None = None,
    tokens: int = 8192,
    *,
    weight_storage: str = "parameters",
    mode: str = "training",
    batch_invariant: bool = False,
) -> ConversionReport:
    """Make the model's linear layers and experts follow a recipe, in place.

    Every ``nn.Parameter`` (but for stored weights) and every key of the state_dict stays, as do hooks. The model may be
    on the meta device. Nothing is changed if an error is raised. Layers that are converted keep their recipe.

    These stay in high precision, unless a pattern has their name (``"*lm_head"`` but not ``"*"``) or ``filter`` is a
    function: output heads, routers, adapters (``lora_A``), conditioning layers (``time_embed``, ``adaLN_modulation``),
    what a model lists in ``_keep_in_fp32_modules``, and layers below 16 in or out features (only by a function).

    Experts, of transformers 5 (``set_experts_implementation`` has no effect then) and torchtitan, are layers, too
    (:func:`tritonfp8.functional.grouped_linear`). The report has the reason for each layer that is skipped.

    Args:
        model: any module; it may be an ``nn.Linear`` itself. ``nn.Linear``, its torchtitan and Falcon classes, and the
            ``Conv1D`` of transformers are converted. Other subclasses of ``nn.Linear`` never are: their forward may
            differ, or be bypassed. Nor are layers whose forward was replaced, unless by the hooks of accelerate.
        recipe: a name, the path of a TOML file (:func:`tritonfp8.recipes.load`), a :class:`~tritonfp8.Recipe`, or a
            mapping of shell-style patterns of full names (``"*.mlp.*"``) to these; the first pattern that matches
            decides, and layers that none matches are skipped.
        filter: which layers to convert: a list of patterns; a function ``filter(module, fqn) -> bool``, which replaces
            the defaults and is asked about experts, too; or ``"auto"``, which leaves out layers that would get slower
            on this GPU (or H200), even all, and experts, as it cannot tell about them.
        tokens: rows of the layers' input in a step (batch x sequence length) on this GPU; for ``filter="auto"``.
        weight_storage: ``"parameters"``, or ``"quantized"``: weights of converted layers become codes and scales
            (:class:`tritonfp8.layers.stored.StoredWeight`). Trained weights must be float32. Experts that train, of
            torchtitan, or sharded before keep their weights; the report has the reason.
        mode: ``"inference"`` freezes the weights of converted layers and stores them.
        batch_invariant: the bits of a row of a layer's output depend only on this row of the input. It needs scales
            for each row of the input: ``"rowwise"``, ``"blockwise"``, ``"mxfp8"``.

    Returns:
        A :class:`ConversionReport`.

    In eval mode ``nn.TransformerEncoderLayer`` may run torch's fused path, which skips the forward of its linear
    layers: ``torch.backends.mha.set_fastpath_enabled(False)`` keeps them on their recipe.

    Raises:
        ValueError: no layer is converted, a pattern decided no layer, an unknown or unfit recipe, or an unfit weight.
        TypeError: no recipe, a chosen layer that torchao converted, or an argument of another type.
    """
    require_module(model)
    stores = _stores(weight_storage, mode, batch_invariant)
    selected = select(model, recipe, filter, tokens, batch_invariant)
    if selected.takes_nothing:
        selected.check_slower()
        return _report(model, selected, None, {})
    storage = for_storage(model, selected, mode) if stores else Storage(selected)
    apply_selection(model, storage, mode == "inference")
    return _report(model, storage.selected, _stored().weight_bytes(model) if stores else None, storage.unstored)


def _report(
    model: nn.Module, selected: Selected, sizes: tuple[int, int] | None, unstored: dict[str, str]
) -> ConversionReport:
    already = {name: each.recipe for name, each in selected.already.items()}
    parameters, share = coverage(model, selected.skipped)
    experts = {name: len(next(iter(each.weights().values()))) for name, each in converted_experts(model).items()}
    return ConversionReport(selected.recipes, selected.skipped, already, parameters, share, sizes, experts, unstored)


def _stored() -> Any:
    """The folder of stored weights, imported on first use: models that train do not need it."""
    from tritonfp8.layers import stored

    return stored


def _stores(weight_storage: str, mode: str, batch_invariant: bool) -> bool:
    """Whether the arguments of :func:`convert`, which this checks, ask for stored weights."""
    require_flag("batch_invariant", batch_invariant)
    require("weight_storage", weight_storage, ("parameters", "quantized"))
    require("mode", mode, ("training", "inference"))
    return weight_storage == "quantized" or mode == "inference"


class Storage(NamedTuple):
    """What a conversion stores in 8 bits.

    Attributes:
        selected: what it converts, with the recipes of stored weights.
        recipes: of all layers whose weights are to be stored; layers that are converted already are among them.
        unstored: of the experts that keep their weights in high precision, the reasons.
    """

    selected: Selected
    recipes: Mapping[str, Recipe] = MappingProxyType({})
    unstored: dict[str, str] = {}  # noqa: RUF012


def for_storage(model: nn.Module, selected: Selected, mode: str, on_meta: bool = False) -> Storage:
    """What to store of the layers that are selected, and of the layers that are converted already.

    Raises:
        ValueError: a weight cannot be stored, or a trained one is not float32.
    """
    found, freeze = _stored(), mode == "inference"
    before = {name: layer for name, layer in selected.already.items() if not found.is_stored(layer)}
    layers: dict[str, Any] = {**selected.modules, **before}
    stay = {name: found.why_experts_stay(layer, freeze) for name, layer in layers.items()}
    unstored = {name: reason for name, reason in stay.items() if reason is not None}
    layers = {name: layer for name, layer in layers.items() if name not in unstored}
    recipes = {name: selected.recipes.get(name) or before[name].recipe for name in layers}
    recipes = {name: found.recipe_of_storage(recipe) for name, recipe in recipes.items()}
    found.check_storable(model, layers, recipes, on_meta)
    if not freeze:
        found.check_trainable(layers)
    chosen = {name: recipes.get(name, recipe) for name, recipe in selected.recipes.items()}
    return Storage(selected._replace(recipes=chosen), recipes, unstored)


def apply_selection(model: nn.Module, storage: Storage, freeze: bool) -> None:
    """Change the classes of the selected layers, all or none, and store weights, or (``freeze``) freeze all of them."""
    selected = storage.selected
    with all_or_nothing(model):
        for name, module in selected.modules.items():
            if computing_class(module) is not None:
                convert_experts(module, selected.recipes[name])
                continue
            computes: type[_Layer] = Float8Conv1D if is_conv1d(module) else Float8Linear
            change_class(module, joined_class(computes, type(module)))
            module.recipe = selected.recipes[name]  # type: ignore[assignment]
        layers = set(converted_layers(model).values())
        share_inputs(model, layers, layers & set(selected.modules.values()))
        record_names(model, {**selected.already, **selected.modules})
        if storage.recipes or freeze:
            found = converted(model)
            for name, recipe in storage.recipes.items():
                found[name].recipe = recipe
            _stored().store_weights({name: found[name] for name in storage.recipes}, freeze)
            for name in storage.unstored if freeze else ():
                for key in _stored().names_of_weights(found[name]):
                    found[name]._parameters[key].requires_grad_(False)  # type: ignore[union-attr]
    teach_counters()
    keep_layers()


def swap_recipe(model: nn.Module, recipe: Recipes | None = None) -> ConversionReport:
    """Change the recipe of a converted model's layers, in place. Parameters stay; an equal recipe recompiles nothing.

    A backward follows the recipe of its forward, also if activation checkpointing recomputes that forward.

    Args:
        model: a converted model.
        recipe: as for :func:`convert`. Layers that no pattern matches keep their recipe; the report lists them as
            skipped.

    Raises:
        ValueError: the model has no converted layer, a pattern decided no layer, or an unknown recipe.
        TypeError: no recipe, or an argument of another type.
    """
    require_module(model)
    choice = Choice(recipe)
    layers = converted(model)
    if not layers:
        raise ValueError("the model has no converted layer: use tritonfp8.convert first")
    chosen = {name: choice.of(name) for name in layers}
    choice.check_all_used(list(layers))
    new_recipes = {module: _swapped(name, module, chosen[name]) for name, module in layers.items()}
    with all_or_nothing(model):
        for module in layers.values():
            # An equal recipe keeps its object, so that compiled code which guards on it stays valid.
            if new_recipes[module] != module.recipe:
                swapping(module)
                module.recipe = new_recipes[module]
    return ConversionReport(
        {name: recipe for name, recipe in chosen.items() if recipe is not None},
        {name: NO_PATTERN for name, recipe in chosen.items() if recipe is None},
    )


def _swapped(name: str, layer: _Layer | ConvertedExperts, chosen: Recipe | None) -> Recipe:
    if chosen is not None and is_converted_experts(layer):
        try:
            check_recipe(chosen)
        except ValueError as error:
            raise ValueError(f"recipe {chosen.name!r} does not serve the experts {name}: {error}") from error
    if chosen is None or all(type(p) in (Tensor, nn.Parameter, type(None)) for p in layer._parameters.values()):
        return chosen or layer.recipe
    found: Recipe = _stored().check_swap(name, layer, chosen)
    return found


@contextmanager
def _released(layers: Iterable[_Layer | ConvertedExperts]) -> Iterator[None]:
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


def _is_wrapped(layer: _Layer) -> bool:
    """Whether code that ran after ``convert`` keeps the forward of a layer of torchtitan inside a function."""
    return isinstance(layer, Float8Linear) and joined_of(layer) is not Float8Linear and not is_own_forward(layer)


def revert(model: nn.Module) -> list[str]:
    """Undo :func:`convert`, in place: layers get back their classes and keep their parameters.

    If other code derived a class from a layer's class in the meantime, the layer gets a class derived from
    ``nn.Linear`` instead: ``FSDPFloat8Linear``, which ``fully_shard`` makes, becomes ``FSDPLinear``. Nothing is changed
    if an error is raised.

    Returns:
        The names of the reverted layers, then of the experts. ``Float8Experts``, which had
        no other class, get the recipe ``"bf16"``.

    Raises:
        ValueError: the model has no converted layer, a block of ``quantize_weights_once`` is open on one, or torchtitan
            sharded one.
        TypeError: ``model`` is not a module, or a layer's class was written as a subclass of :class:`Float8Linear`.
    """
    require_module(model)
    layers, experts = converted_layers(model), converted_experts(model)
    if not layers and not experts:
        raise ValueError("the model has no converted layer: there is nothing to revert")
    if cached := [name for name, module in layers.items() if module.cached_weight is not None]:
        raise ValueError(f"quantize_weights_once is open on {listed(cached)}: revert after the block")
    if wrapped := [name for name, module in layers.items() if _is_wrapped(module)]:
        raise ValueError(f"torchtitan wrapped the forward of {listed(wrapped)} to shard it: revert before that")
    classes = {module: class_before(module) for module in layers.values()}
    of_experts = {module: experts_before(module) for module in experts.values()}
    with all_or_nothing(model), _released([*layers.values(), *experts.values()]):
        for converted in (*layers.values(), *experts.values()):
            converted.drop_hooks()
        for module, cls in classes.items():
            assert cls is not None
            change_class(module, cls)
            module.__dict__.pop("recipe", None)
        for each, cls_before in of_experts.items():
            revert_experts(each, cls_before)
        unshare_inputs(model)
        forget_names(model, [*layers.values(), *experts.values()])
        return [*layers, *experts]
