"""Which layers of a model a call of ``convert`` takes, and why not the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tritonfp8.conversion.report import ConversionReport
from tritonfp8.conversion.selection.choice import Choice, Recipes
from tritonfp8.conversion.selection.filters import Filter, Selection
from tritonfp8.layers import check_not_torchao, is_own_forward
from tritonfp8.layers.linear import (
    Float8Conv1D,
    Float8Linear,
    computes_linear,
    is_conv1d,
    is_converted,
)
from tritonfp8.layers.moe import (
    ConvertedExperts,
    class_of_experts,
    computing_class,
    is_converted_experts,
    why_unfit_experts,
)
from tritonfp8.recipes import Recipe

NO_PATTERN = "no pattern matched"


Converted = Float8Linear | Float8Conv1D | ConvertedExperts
"""The classes of what follows a recipe."""


class Selected(NamedTuple):
    """What a conversion is about to do. Layers are linear layers and modules of experts.

    Attributes:
        modules: the layers to convert, by fully qualified name.
        recipes: the recipe of each.
        skipped: for each other layer, the reason.
        already: the layers that are converted already.
        slower: the skipped layers that ``filter="auto"`` leaves out, because they would get slower.
    """

    modules: dict[str, nn.Module]
    recipes: dict[str, Recipe]
    skipped: dict[str, str]
    already: dict[str, Converted]
    slower: frozenset[str] = frozenset()

    @property
    def takes_nothing(self) -> bool:
        """Whether nothing is to be converted, and nothing is already."""
        return not (self.modules or self.already)

    def check_slower(self) -> None:
        """Raise ValueError unless ``filter="auto"`` left out a layer: it may leave out all of them."""
        if not self.slower:
            none = "the model has no nn.Linear, and no experts of transformers 5 or torchtitan"
            raise ValueError(f"nothing was converted: {ConversionReport({}, self.skipped) if self.skipped else none}")


def linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The linear layers of a model, converted or not: ``nn.Linear``, its subclasses and ``Conv1D`` of transformers."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or is_conv1d(module) or is_converted(module):
            yield name, module


def converted_layers(model: nn.Module) -> dict[str, Float8Linear | Float8Conv1D]:
    """The converted linear layers of a model by fully qualified name."""
    return {name: module for name, module in model.named_modules() if is_converted(module)}


def converted_experts(model: nn.Module) -> dict[str, ConvertedExperts]:
    """The experts of a model that follow a recipe, by fully qualified name."""
    return {name: module for name, module in model.named_modules() if is_converted_experts(module)}


def converted(model: nn.Module) -> dict[str, Converted]:
    """Both of them, linear layers first."""
    return {**converted_layers(model), **converted_experts(model)}


def sizes_of(layer: Any) -> tuple[int, int]:
    """In and out features of a linear layer; of experts the features outside and inside."""
    if (experts := class_of_experts(layer)) is not None:
        first, second = list(experts.weights(layer).values())[:2]
        return first.shape[2], second.shape[2]
    return (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else tuple(layer.weight.shape)


def select(
    model: nn.Module, recipe: Recipes | None, filter: Filter | None, tokens: int, batch_invariant: bool = False
) -> Selected:
    """The layers that ``convert`` takes; see there for the arguments.

    Raises:
        ValueError: a pattern decides no layer, or an unusable argument; or ``batch_invariant`` and a layer that is
            converted already and is not.
        TypeError: a chosen layer is torchao's, or an argument of another type.
    """
    choice, selection = Choice(recipe, batch_invariant), Selection(model, filter, tokens)
    found = Selected({}, {}, {}, converted(model))
    for name, before in found.already.items():
        if batch_invariant and not before.recipe.output.batch_invariant:
            raise ValueError(
                f"batch_invariant=True, but {name or 'the model'} is converted already and keeps its recipe "
                f"{before.recipe.name!r}, which is not: revert the model first, or give its layers "
                "recipes.get(..., batch_invariant=True) by swap_recipe"
            )
        # Its patterns are of use: the layer may follow them since an earlier call.
        choice.of(name)
        selection.matching(name)
    others = dict(linears(model)).keys() | {n for n, each in model.named_modules() if _are_experts(each)}
    for name, module in model.named_modules():
        if name not in others or name in found.already:
            continue
        if reason := _why_not(name, module, choice, selection):
            found.skipped[name] = reason
        else:
            chosen = choice.of(name)
            assert chosen is not None
            found.modules[name], found.recipes[name] = module, chosen
    unmatched = [name for name, reason in found.skipped.items() if reason == NO_PATTERN]
    choice.check_all_used([*found.already, *found.modules, *unmatched], found.skipped)
    selection.check_all_used(found.skipped)
    for names in selection.blocks(found.modules):
        sizes = {name: sizes_of(found.modules[name]) for name in names}
        reason = selection.why_slower_block(sizes, found.recipes, _device_of(found.modules[names[0]]))
        for name in names if reason else ():
            del found.modules[name], found.recipes[name]
            found.skipped[name] = str(reason)
    return found._replace(slower=frozenset(selection.slower))


def _device_of(module: nn.Module) -> torch.device:
    return next(p.device for p in module.parameters())


def _why_not(name: str, module: nn.Module, choice: Choice, selection: Selection) -> str | None:
    """The reason why a layer is not converted, or None."""
    of_torchao, found = _is_of_torchao(module), choice.find(name)
    unfit = _why_unfit_experts(module, found) if _are_experts(module) else why_unfit(module)
    if unfit and not of_torchao:
        return unfit
    sizes = sizes_of(module)
    if reason := selection.reason(name, module, sizes, found):
        if found is not None and selection.keeps(name, module, sizes):
            # "*" is of use even if all that it matches stays in high precision by default.
            choice.of(name)
        return reason
    if found is None:
        return NO_PATTERN
    if of_torchao:
        _refuse_torchao(name, module)
    return None


def _are_experts(module: nn.Module) -> bool:
    """Whether these are experts of a known kind, or experts that another program keeps in 8 bits."""
    return computing_class(module) is not None or _has_8_bit_experts(module)


def _has_8_bit_experts(module: nn.Module) -> bool:
    return any(p is not None and _is_in_8_bits(p) and p.ndim == 3 for p in module._parameters.values())


def _why_unfit_experts(module: nn.Module, found: tuple[str, Recipe] | None) -> str | None:
    if _has_8_bit_experts(module):
        return f"another program keeps experts in 8 bits ({type(module).__name__}): {_LOAD}"
    computes = computing_class(module)
    assert computes is not None
    return why_unfit_experts(module, computes, None if found is None else found[1])


def why_unfit(module: nn.Module) -> str | None:
    """The reason why a linear layer that is not converted may not be computed as ``nn.Linear``, or None."""
    weight = module._parameters.get("weight")
    if weight is not None and _is_in_8_bits(weight):
        return f"another program keeps its weight in 8 bits ({type(module).__name__}): {_LOAD}"
    if computes_linear(type(module)) or is_conv1d(module):
        return None if is_own_forward(module) else "its forward was replaced on the instance: it may compute otherwise"
    if nn.utils.parametrize.is_parametrized(module):
        return "parametrized: its weight is computed and not a parameter"
    return f"a subclass of nn.Linear ({type(module).__name__}), which may compute something else"


_LOAD = "make the model from its config, and read the checkpoint by tritonfp8.export.load"


def _is_in_8_bits(parameter: Tensor) -> bool:
    return parameter.dtype.is_floating_point and parameter.dtype.itemsize == 1


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _is_of_torchao(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return "torchao" in (_package(type(module)), _package(type(weight)))


def _refuse_torchao(name: str, module: nn.Module) -> None:
    check_not_torchao(f"the weight of {name or 'the model'}", module._parameters.get("weight"))
    raise TypeError(
        f"{name or 'the model'} must be a plain nn.Linear; got {type(module).__name__} of torchao. torchao's "
        "convert_to_float8_training and tritonfp8 cannot both compute one layer: leave the layer out of one of them by "
        "its filter"
    )
