"""Float8Linear: nn.Linear with a recipe."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tritonfp8.checks import require_type
from tritonfp8.layers.linear.dispatch import linear
from tritonfp8.layers.linear.input_cache import SharedInput
from tritonfp8.layers.linear.operands import Operands
from tritonfp8.layers.linear.quantized_input import QuantizedInput, check_whole, is_distributed, quantized_linear
from tritonfp8.layers.linear.weight_cache import CachedWeight
from tritonfp8.recipes import Recipe, get

_NO_RECIPE = (
    "a Float8Linear was made without recipe= and follows 'rowwise'. A class does not carry the recipe of the layer "
    "that it was taken from: give recipe=layer.recipe, or recipe='rowwise' if that is meant"
)


def require_module(model: object) -> None:
    """Raise TypeError unless ``model`` is a module."""
    require_type("model", model, nn.Module, "an nn.Module")


class Float8Linear(nn.Linear):
    """``nn.Linear`` whose three GEMMs follow a recipe: same parameters, same state_dict keys, same initialization.

    Args:
        in_features, out_features, bias, device, dtype: as ``nn.Linear``.
        recipe: a name or a :class:`~tritonfp8.Recipe`. The default is ``"rowwise"``, with a FutureWarning: code that
            copies a layer by ``type(layer)(in_features, out_features)`` loses the recipe of that layer.

    Input ``[..., in_features]``, a tensor or what a fused norm of the same recipe returns; output
    ``[..., out_features]``. Saved for backward, for M rows of input and K in_features: ``input.T`` in 8 bits, M K bytes
    and scales, or 2 M K bytes (bf16) where the recipe keeps grad_weight in high precision; nothing if the weight needs
    no grad. See :func:`tritonfp8.functional.linear` for dtypes and errors.
    """

    recipe: Recipe
    shared_input: SharedInput | None = None
    cached_weight: CachedWeight | None = None
    # Whether a fused norm makes the input, or a fused MLP reads the weight.
    is_fused: bool = False
    # tritonfp8.revert calls this first. It may return a function that undoes the call, for a revert that fails later.
    on_revert: Callable[[Float8Linear], object] | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        recipe: str | Recipe | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        if recipe is None:
            warnings.warn(_NO_RECIPE, FutureWarning, stacklevel=2)
        self.recipe = get("rowwise" if recipe is None else recipe)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As ``nn.Module``. A parallel style shards a layer by this; a fused layer refuses that.

        Raises:
            TypeError: a DTensor for a fused layer whose parameter was a plain tensor.
        """
        # FSDP2 puts one distributed tensor in the place of another, and gathers it before the layer runs.
        if self.is_fused and not is_distributed(self._parameters.get(name)):
            check_whole(param)
        super().register_parameter(name, param)

    def forward(self, input: Tensor | QuantizedInput) -> Tensor:
        """``input @ weight.T + bias`` by the recipe."""
        cached = self.cached_operands()
        if isinstance(input, QuantizedInput):
            return quantized_linear(input, self.weight, self.bias, self.recipe, quantized_weight=cached)
        return linear(
            input, self.weight, self.bias, self.recipe, quantized_weight=cached, shared_input=self.shared_input
        )

    def cached_operands(self) -> Operands | None:
        """The cached operands of the weight, inside :func:`tritonfp8.quantize_weights_once`; else None."""
        cached = self.cached_weight
        # A shallow copy of the layer may outlive the scope.
        if cached is None or not cached.open:
            return None
        cached.check(self)
        return cached.operands

    def extra_repr(self) -> str:
        """The fields of ``nn.Linear`` and the recipe."""
        return f"{super().extra_repr()}, recipe={self.recipe.name!r}"
