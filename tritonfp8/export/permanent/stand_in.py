"""A stand-in of a model whose computed weights are parameters under their plain names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tritonfp8.export.permanent.adapters import Merging, is_tuner, main_layer, unwrapped_by_peft, without_adapters
from tritonfp8.export.permanent.computed import Computed, class_without_properties, computed_tensors
from tritonfp8.export.places import joined, whole


def permanent(model: nn.Module) -> nn.Module:
    """A stand-in of ``model`` that has each weight that is computed as a parameter; ``model`` if none is.

    It has the tree of modules without what computes, and shares all else. Such a parameter takes no memory:
    :func:`value_of` computes it.

    Raises:
        ValueError: adapters on a tied weight, or on one that is computed.
    """
    return _Maker().made("", model)


def value_of(tensor: Tensor) -> Tensor:
    """All of a tensor of a stand-in, computed if the model computes it; without gradients."""
    compute = getattr(tensor, "compute", None)
    if compute is None:
        return whole(tensor)
    with torch.no_grad():
        return whole(compute()).to(tensor.dtype)


def _promised(like: Tensor, compute: Callable[[], Tensor]) -> nn.Parameter:
    """A Parameter like a tensor, without its memory."""
    one = torch.empty((), dtype=like.dtype, device=like.device)
    found: Any = nn.Parameter(one.expand(like.shape), requires_grad=False)
    found.compute = compute
    return found


class _Maker:
    def __init__(self) -> None:
        self._made: dict[nn.Module, nn.Module] = {}
        self._merging = Merging()
        self._merged: dict[tuple[nn.Module, str], nn.Parameter] = {}
        # By a parameter of the model, what stands in its place, and its name there.
        self._places: dict[Tensor, tuple[Tensor, str]] = {}

    def made(self, path: str, module: nn.Module) -> nn.Module:
        if module not in self._made:
            made = self._made[module] = self._make(path, module)
            self._check_tied(path, without_adapters(module), made)
        return self._made[module]

    def _make(self, path: str, module: nn.Module) -> nn.Module:
        layer: Any = unwrapped_by_peft(module)
        source = layer.get_base_layer() if is_tuner(layer) else layer
        computed = computed_tensors(source)
        children = {
            name: child if child is None else self.made(joined(path, name), child)
            for name, child in source._modules.items()
            if name != "parametrizations" or not computed
        }
        if is_tuner(layer):
            promises = self._of_adapters(path, layer, source, computed)
        else:
            promises = {name: _of_torch(each) for name, each in computed.items()}
        if source is module and not promises and all(children[name] is x for name, x in module._modules.items()):
            return module
        return _stand_in(source, children, promises, computed)

    def _of_adapters(
        self, path: str, layer: Any, source: nn.Module, computed: dict[str, Computed]
    ) -> dict[str, nn.Parameter]:
        if computed:
            raise ValueError(
                f"the weight of {path} is computed (parametrized, normed or pruned), and adapters are added to it: "
                "make that permanent first"
            )
        main, found = main_layer(layer), {}
        for name, p in source._parameters.items():
            if p is not None and (main, name) not in self._merged:
                self._merged[main, name] = _promised(p, partial(self._merging.value, path, main, name))
            if p is not None:
                found[name] = self._merged[main, name]
        return found

    def _check_tied(self, path: str, before: nn.Module, made: nn.Module) -> None:
        """Raise ValueError if a parameter of several modules is not one tensor in the stand-in."""
        for name, p in before._parameters.items():
            stand_in = made._parameters.get(name)
            if p is None or stand_in is None:
                continue
            other, other_name = self._places.setdefault(p, (stand_in, joined(path, name)))
            if other is not stand_in:
                raise ValueError(
                    f"{other_name} and {joined(path, name)} are one tensor, and two with these adapters, which loaders "
                    "would tie again: export what model.merge_and_unload() returns, whose config says so, or untie the "
                    "model first (tie_word_embeddings=False)"
                )


def _of_torch(computed: Computed) -> nn.Parameter:
    with torch.no_grad():
        return _promised(computed.value(), computed.value)


def _stand_in(
    source: nn.Module,
    children: dict[str, nn.Module | None],
    promises: dict[str, nn.Parameter],
    computed: dict[str, Computed],
) -> nn.Module:
    gone = {*promises, *(name for each in computed.values() for name in each.sources)}
    is_parametrized = "parametrizations" in source._modules
    # Without __init__, which would make parameters.
    made: Any = object.__new__(class_without_properties(source, tuple(computed)) if is_parametrized else type(source))
    made.__dict__.update({name: x for name, x in source.__dict__.items() if name not in computed})
    made._modules = children
    made._parameters = {**promises, **{name: p for name, p in source._parameters.items() if name not in gone}}
    made._buffers = {name: x for name, x in source._buffers.items() if name not in gone}
    found: nn.Module = made
    return found
