"""The weights that torch computes before a layer runs: parametrizations, weight and spectral norm, pruning."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm


class Computed(NamedTuple):
    """A tensor that a module computes.

    Attributes:
        value: computes it, as the module does in eval mode.
        sources: the parameters and buffers that it is computed from.
    """

    value: Callable[[], Tensor]
    sources: tuple[str, ...] = ()


def computed_tensors(module: nn.Module) -> dict[str, Computed]:
    """The tensors that torch computes for ``module``, by the names that they have once that is made permanent."""
    found = {}
    if parametrize.is_parametrized(module):
        found = {name: Computed(partial(_parametrized, module, name)) for name in module.parametrizations}  # type: ignore[union-attr]
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            value = partial(hook.compute_weight, module)
            found[hook.name] = Computed(value, (f"{hook.name}_g", f"{hook.name}_v"))
        elif isinstance(hook, SpectralNorm):
            value = partial(hook.compute_weight, module, do_power_iteration=False)
            found[hook.name] = Computed(value, tuple(f"{hook.name}_{each}" for each in ("orig", "u", "v")))
        elif isinstance(hook, prune.BasePruningMethod):
            names = (key.removesuffix("_orig") for key in module._parameters if key.endswith("_orig"))
            for name in names:
                if f"{name}_mask" in module._buffers:
                    found[name] = Computed(partial(_pruned, module, name), (f"{name}_orig", f"{name}_mask"))
    return found


def _parametrized(module: nn.Module, name: str) -> Tensor:
    # In training mode a spectral norm goes one iteration on, which changes its buffers.
    inside = list(module.parametrizations[name].modules())  # type: ignore[index, union-attr]
    flags = [each.training for each in inside]
    try:
        for each in inside:
            each.training = False
        found: Tensor = getattr(module, name)
    finally:
        for each, flag in zip(inside, flags, strict=True):
            each.training = flag
    return found


def _pruned(module: nn.Module, name: str) -> Tensor:
    original, mask = getattr(module, f"{name}_orig"), getattr(module, f"{name}_mask")
    found: Tensor = mask.to(original.dtype) * original
    return found


def class_without_properties(module: nn.Module, names: tuple[str, ...]) -> type[nn.Module]:
    """The class of a module before parametrizations derived one from it, in which these names are properties."""
    classes = (cls for cls in type(module).__mro__ if issubclass(cls, nn.Module))
    return next(cls for cls in classes if not any(isinstance(getattr(cls, name, None), property) for name in names))
