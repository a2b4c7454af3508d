"""What others change about the parameters of a converted layer: stored weights, and the 8-bit gather of FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

from torch import Tensor, nn

from tritonfp8.layers.codes import check_not_torchao, refuse_codes, refuse_scales
from tritonfp8.recipes import Recipe
from tritonfp8.specs import QuantSpec
from tritonfp8.specs.checks import shown


class ParameterHooks(nn.Module):
    """The base of all converted layers. They take values as parameters, and refuse codes."""

    recipe: Recipe
    # tritonfp8.revert calls this first. It may return a function that undoes the call, for a revert that fails later.
    on_revert: Callable[[Any], object] | None = None
    # Takes a Parameter that is assigned, and returns the one to keep.
    on_assign: Callable[[Any, str, nn.Parameter], nn.Parameter] | None = None
    # A context around reset_parameters, if a weight cannot be initialized as it is.
    on_reset: Callable[[Any], AbstractContextManager[None]] | None = None
    # A context in which Module.to and its kind change the other parameters; it changes the stored ones itself.
    on_move: Callable[[Any, Callable[[Tensor], Tensor]], AbstractContextManager[None]] | None = None

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As ``nn.Module``; in the place of a stored weight the values are stored.

        Raises:
            ValueError: ``param`` has codes.
            TypeError: it is a tensor of torchao's.
        """
        check_not_torchao(f"the {name} of a converted layer", param)
        refuse_codes(f"the parameter {name}", param)
        if param is not None and self.on_assign is not None:
            param = self.on_assign(self, name, param)
        # Not by super(): on_assign may have given the layer back its class.
        nn.Module.register_parameter(self, name, param)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *others: Any) -> None:
        for key in self._parameters:
            if isinstance(found := state_dict.get(prefix + key), Tensor):
                refuse_codes(prefix + key, found)
        refuse_scales(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        with nullcontext() if self.on_move is None else self.on_move(self, fn):
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _recipe_and_storage(self) -> str:
        """The recipe as the repr of the layer has it, and the format of a weight that is stored in 8 bits."""
        specs = (getattr(getattr(p, "_local_tensor", p), "spec", None) for p in self._parameters.values())
        stored = next((f", stored={spec.format}" for spec in specs if isinstance(spec, QuantSpec)), "")
        return f"recipe={shown(self.recipe.name, 26)}{stored}"

    def drop_hooks(self) -> None:
        """Leave the parameters of this layer to torch."""
        for name in ("on_revert", "on_assign", "on_reset", "on_move"):
            self.__dict__.pop(name, None)
