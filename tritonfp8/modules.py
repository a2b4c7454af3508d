"""Float8Linear: nn.Linear with a recipe."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tritonfp8.autograd_fused import QuantizedInput, quantized_linear
from tritonfp8.functional import linear
from tritonfp8.recipes import Recipe, get


class Float8Linear(nn.Linear):
    """``nn.Linear`` whose three GEMMs follow a recipe: same parameters, same state_dict keys, same initialization.

    Args:
        in_features, out_features, bias, device, dtype: as ``nn.Linear``.
        recipe: a name or a :class:`~tritonfp8.Recipe`.

    Input ``[..., in_features]``, a tensor or what a fused norm of the same recipe returns; output
    ``[..., out_features]``. Saved for backward, for M rows of input and K in_features: ``input.T`` in 8 bits, M K bytes
    and scales, or 2 M K bytes (bf16) where the recipe keeps grad_weight in high precision; nothing if the weight needs
    no grad. See :func:`tritonfp8.functional.linear` for dtypes and errors.
    """

    recipe: Recipe

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        recipe: str | Recipe = "rowwise",
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.recipe = get(recipe)

    def forward(self, input: Tensor | QuantizedInput) -> Tensor:
        """``input @ weight.T + bias`` by the recipe."""
        if isinstance(input, QuantizedInput):
            return quantized_linear(input, self.weight, self.bias, self.recipe)
        return linear(input, self.weight, self.bias, self.recipe)

    def extra_repr(self) -> str:
        """The fields of ``nn.Linear`` and the recipe."""
        return f"{super().extra_repr()}, recipe={self.recipe.name!r}"
