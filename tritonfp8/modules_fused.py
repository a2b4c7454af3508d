"""Modules that hand quantized results on: RMSNorm before linears, and the SwiGLU MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tritonfp8.autograd_fused import (
    QuantizedInput,
    check_whole,
    is_distributed,
    is_fusable,
    quantized_rms_norm,
    rms_norm,
    swiglu,
)
from tritonfp8.modules import Float8Linear
from tritonfp8.recipes import Recipe, get
from tritonfp8.specs import RMS_NORM_ROUNDINGS, require


class Float8RMSNorm(nn.Module):
    """RMSNorm whose result is read by converted linears only, and so is made in 8 bits.

    Args:
        hidden_size: K, of the weight ``[K]``.
        eps: added to the mean square; None is the machine epsilon of the input's dtype, as in ``nn.RMSNorm``.
        recipe: a name or a :class:`~tritonfp8.Recipe`: that of every linear that reads the result.
        rounding: ``"output"`` (``nn.RMSNorm``) or ``"normalized"`` (Llama in transformers).
        device, dtype: of the weight.

    Input ``[..., K]``; output a :class:`~tritonfp8.autograd_fused.QuantizedInput` of that shape, which ``Float8Linear``
    and ``Float8SwiGLU`` take in place of a tensor; a tensor where the recipe keeps a product in high precision. Keys of
    the state_dict: ``weight``, as in ``nn.RMSNorm``.
    """

    recipe: Recipe
    # The class that tritonfp8.convert changed to this one.
    fused_from: type[nn.Module] | None = None

    def __init__(
        self,
        hidden_size: int,
        eps: float | None = 1e-6,
        *,
        recipe: str | Recipe = "rowwise",
        rounding: str = "output",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        require("rounding", rounding, RMS_NORM_ROUNDINGS)
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps = eps
        self.rounding = rounding
        self.recipe = get(recipe)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As :meth:`Float8Linear.register_parameter`."""
        if not is_distributed(self._parameters.get(name)):
            check_whole(param)
        super().register_parameter(name, param)

    def forward(self, input: Tensor) -> QuantizedInput | Tensor:
        """RMSNorm of ``input``, for linears of the recipe."""
        eps = torch.finfo(input.dtype).eps if self.eps is None else self.eps
        if is_fusable(self.recipe):
            return quantized_rms_norm(input, self.weight, eps, self.recipe, self.rounding)
        return rms_norm(input, self.weight, eps, self.rounding)

    def extra_repr(self) -> str:
        """Size, eps, rounding and recipe."""
        return f"{self.weight.numel()}, eps={self.eps}, rounding={self.rounding!r}, recipe={self.recipe.name!r}"


class Float8SwiGLU(nn.Module):
    """The MLP of Llama, ``down_proj(silu(gate_proj(x)) * up_proj(x))``, with 8 bits between its products.

    Args:
        hidden_size: K.
        intermediate_size: F.
        recipe: a name or a :class:`~tritonfp8.Recipe`, of all three linears.
        device, dtype: of the weights.

    Input ``[..., K]``, a tensor or what :class:`Float8RMSNorm` returns; output ``[..., K]``. Keys of the state_dict:
    ``gate_proj.weight``, ``up_proj.weight``, ``down_proj.weight``, as in ``LlamaMLP``. The linears are read and not
    called: hooks on them do not run.
    """

    fused_from: type[nn.Module] | None = None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        recipe: str | Recipe = "rowwise",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype, "recipe": recipe}
        self.gate_proj = Float8Linear(hidden_size, intermediate_size, **options)
        self.up_proj = Float8Linear(hidden_size, intermediate_size, **options)
        self.down_proj = Float8Linear(intermediate_size, hidden_size, **options)
        for linear in (self.gate_proj, self.up_proj, self.down_proj):
            linear.is_fused = True

    @property
    def recipe(self) -> Recipe:
        """The recipe of the three linears."""
        return self.gate_proj.recipe

    def forward(self, x: Tensor | QuantizedInput) -> Tensor:
        """The MLP of ``x`` by the recipe."""
        linears = (self.gate_proj, self.up_proj, self.down_proj)
        recipe = self.recipe
        if any(linear.recipe != recipe for linear in linears[1:]):
            names = ", ".join(repr(linear.recipe.name) for linear in linears)
            raise ValueError(f"the three linears of a fused MLP must follow one recipe; got {names}")
        gate, up, down = (linear.weight for linear in linears)
        return swiglu(x, gate, up, down, recipe, quantized_weights=[linear.held_operands() for linear in linears])
