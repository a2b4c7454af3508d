"""Adapters of peft: the modules that they wrap, and the weights that these have once the adapters are merged."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor, nn

from tritonfp8.export.places import whole
from tritonfp8.layers.stored import plain_weight
from tritonfp8.specs.checks import require
from tritonfp8.specs.naming import listed

MERGED = "merged"


def check_adapters(model: nn.Module, adapters: object) -> None:
    """Check the argument ``adapters`` of an export.

    Raises:
        ValueError: another value than None and ``"merged"``; a model with adapters and None; or adapters that no weight
            can take up.
    """
    require("adapters", adapters, (None, MERGED))
    if prompts := [name for each in model.modules() for name in _prompts(each)]:
        raise ValueError(
            f"the adapter {prompts[0]!r} of peft learns prompts, which no weight can take up: export its base by "
            "model.get_base_model(), and save the prompts by model.save_pretrained"
        )
    found = [name for name, module in model.named_modules() if is_tuner(module) or _is_wrapper(module)]
    if found and adapters is None:
        raise ValueError(
            f"the model has adapters of peft in {len(found)} modules, such as {listed(found, 1)}: engines know their "
            'parts by no name. Give adapters="merged", which writes the merged weights and leaves the model as it is, '
            "or export what model.merge_and_unload() returns"
        )


def _is_of_peft(module: nn.Module, file: str, *classes: str) -> bool:
    """Whether a module is of one of these classes; without an import of peft, which a model of peft has imported."""
    peft = sys.modules.get(file)
    return peft is not None and isinstance(module, tuple(getattr(peft, name) for name in classes))


def is_tuner(module: nn.Module) -> bool:
    """Whether a module adds an adapter to another one."""
    return _is_of_peft(module, "peft.tuners.tuners_utils", "BaseTunerLayer")


def _is_wrapper(module: nn.Module) -> bool:
    """Whether a module has a copy of another one that is trained, or trained rows of it."""
    return _is_of_peft(module, "peft.utils.other", "AuxiliaryTrainingWrapper")


def _is_peft_model(module: nn.Module) -> bool:
    return _is_of_peft(module, "peft", "PeftModel", "PeftMixedModel")


def _prompts(module: Any) -> list[str]:
    if not _is_peft_model(module) or not hasattr(module, "active_adapters"):
        return []
    names: list[str] = module.active_adapters
    return [name for name in names if getattr(module.peft_config[name], "is_prompt_learning", False)]


def unwrapped_by_peft(module: Any) -> nn.Module:
    """The module that a wrapper of peft without an adapter of its own stands for; any other as it is."""
    while True:
        if _is_peft_model(module):
            module = module.get_base_model()
        elif _is_wrapper(module) and hasattr(module, "token_adapter"):
            module = module.token_adapter
        elif _is_wrapper(module):
            module = _unloaded(module, merge=False)
        else:
            found: nn.Module = module
            return found


def _unloaded(wrapper: Any, merge: bool) -> nn.Module:
    found: nn.Module = wrapper.unload_and_optionally_merge_module(merge=merge, safe_merge=False, adapter_names=None)
    return found


def without_adapters(module: Any) -> nn.Module:
    """The module of the base that a module of peft stands for; any other as it is."""
    if _is_wrapper(module):
        module = module.original_module
    found: nn.Module = module.get_base_layer() if is_tuner(module) else module
    return found


def main_layer(layer: Any) -> nn.Module:
    """The layer whose adapter a layer has, too, because their weights are one tensor; by default itself."""
    found: nn.Module = getattr(layer, "tied_adapter", None) or layer
    return found


class Merging:
    """Merges the adapters of one layer at a time, in a copy of it."""

    def __init__(self) -> None:
        self._layer: nn.Module | None = None
        self._found: dict[str, Tensor] = {}

    def value(self, path: str, layer: Any, name: str) -> Tensor:
        """A parameter of the module that ``layer`` adds its adapters to, merged.

        Raises:
            ValueError: the adapters are disabled, or cannot be merged.
        """
        if self._layer is not layer:
            self._layer, self._found = None, {}
            self._found, self._layer = _merged(path, layer), layer
        return self._found[name]


def _merged(path: str, layer: Any) -> dict[str, Tensor]:
    if layer.disable_adapters:
        raise ValueError(
            f"the adapters of {path} are disabled, so it is not clear whether to merge them: enable them, or export "
            "what model.unload() returns"
        )
    # A stored weight cannot take up adapters, but its values can. deepcopy takes these for the parameters.
    plain = {id(p): nn.Parameter(plain_weight(whole(p)).clone(), requires_grad=False) for p in layer.parameters()}
    made = copy.deepcopy(layer, plain)
    try:
        base = _merge(made)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"peft cannot merge the adapters of {path}: {error}") from error
    return dict(base.named_parameters())


@torch.no_grad()
def _merge(layer: Any) -> nn.Module:
    """Merge the adapters of a layer in place. Returns the module that has the merged weights."""
    if hasattr(layer, "unload_and_optionally_merge_module"):
        return _unloaded(layer, merge=True)
    chain = [layer]
    while is_tuner(inner := chain[-1].base_layer):
        chain.append(inner)
    for each in reversed(chain):
        if not each.merged:
            each.merge(safe_merge=False)
    base: nn.Module = chain[-1].base_layer
    return base
