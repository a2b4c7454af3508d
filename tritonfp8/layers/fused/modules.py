"""Modules that return or pass on quantized results: RMSNorm before linears, and the SwiGLU MLP."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from tritonfp8 import counting
from tritonfp8.checks import require
from tritonfp8.layers.fused.rms_norm import quantized_rms_norm, rms_norm
from tritonfp8.layers.fused.swiglu import swiglu
from tritonfp8.layers.in_place import is_bound
from tritonfp8.layers.linear import Float8Linear, QuantizedInput, check_whole, is_distributed, is_fusable
from tritonfp8.layers.unsupported import refuse_script
from tritonfp8.recipes import Recipe, get
from tritonfp8.specs import RMS_NORM_ROUNDINGS

# Torch fills these and never puts others in their place.
_AFTER, _BEFORE = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
_BACKWARD, _BEFORE_BACKWARD = torch_module._global_backward_hooks, torch_module._global_backward_pre_hooks


def is_touched(module: nn.Module) -> bool:
    """Whether a module has hooks, or a forward that is not its class's: these see its inputs and results."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    return "forward" in module.__dict__ and not is_bound(module.__dict__["forward"], module)


def is_everything_touched() -> bool:
    """Whether global hooks see the inputs and results of every module."""
    return bool(_AFTER or _BEFORE or _BACKWARD or _BEFORE_BACKWARD)


def are_plain(linears: Iterable[nn.Module | None]) -> bool:
    """Whether all of these are converted linears that do nothing else when they are called.

    An adapter or a wrapper is not, nor is a linear that was sharded, parametrized or pruned by itself.
    """
    for linear in linears:  # noqa: SIM110 - this runs in each pass, and a generator is slower.
        if type(linear) is not Float8Linear or is_touched(linear):
            return False
    return True


class Reader:
    """The one module that is called with the result of a fused norm, looked up at each call.

    Attributes:
        name: its name in the parent.
        cls: its class when the norm was fused.
        inputs: the names of its linears that read the result; empty if it is a linear itself.
    """

    def __init__(self, parent: nn.Module | None, name: str, cls: type, inputs: tuple[str, ...]) -> None:
        # Weak, so that there is no cycle, and a model is freed at once.
        self._parent = None if parent is None else weakref.ref(parent)
        self.name = name
        self.cls = cls
        self.inputs = inputs

    def __deepcopy__(self, memo: dict[int, Any]) -> Reader:
        # The copy's parent; a norm that is copied by itself has none.
        parent = None if self._parent is None else memo.get(id(self._parent()))
        return Reader(parent, self.name, self.cls, self.inputs)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        parent = None if self._parent is None else self._parent()
        return Reader, (parent, self.name, self.cls, self.inputs)

    def takes_8_bits(self) -> bool:
        """Whether only converted linears see the reader's input now."""
        parent = None if self._parent is None else self._parent()
        if parent is None or parent.__dict__.get("forward") is not None:
            return False
        module = parent._modules.get(self.name)
        if module is None or type(module) is not self.cls or is_touched(module):
            return False
        if isinstance(module, Float8SwiGLU) and not module.runs_fused():
            return False
        return are_plain([module._modules.get(name) for name in self.inputs] if self.inputs else [module])


class Float8RMSNorm(nn.Module):
    """RMSNorm that returns 8 bits, because only converted linears read its result.

    Args:
        hidden_size: K, of the weight ``[K]``.
        eps: added to the mean square; None is the machine epsilon of the input's dtype, as in ``nn.RMSNorm``.
        recipe: a name or a :class:`~tritonfp8.Recipe`: the recipe of every linear that reads the result.
        rounding: ``"output"`` (``nn.RMSNorm``) or ``"normalized"`` (Llama in transformers).
        device, dtype: of the weight.

    Input ``[..., K]``; output a :class:`~tritonfp8.layers.linear.QuantizedInput` of that shape, which ``Float8Linear``
    and ``Float8SwiGLU`` take in place of a tensor. If the recipe keeps a GEMM in high precision, it is a tensor.
    Keys of the state_dict: ``weight``, as in ``nn.RMSNorm``.
    """

    recipe: Recipe
    # The class that tritonfp8.convert changed to this one, and the reader of the result at that time.
    fused_from: type[nn.Module] | None = None
    reader: Reader | None = None
    # The attribute for eps of the class before.
    eps_name: str = "eps"

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
        """RMSNorm of ``input``, for linears of the recipe.

        It returns a tensor, as the norm did before it was fused, while something else would see the 8 bits: a hook on
        the norm or on its reader, an adapter.
        """
        if self.fused_from is not None and not self.runs_fused():
            out: Tensor = self.fused_from.forward(self, input)
            return out
        given: float | None = getattr(self, self.eps_name)
        eps = torch.finfo(input.dtype).eps if given is None else given
        if is_fusable(self.recipe):
            return quantized_rms_norm(input, self.weight, eps, self.recipe, self.rounding)
        return rms_norm(input, self.weight, eps, self.rounding)

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_script(self)

    def runs_fused(self) -> bool:
        """Whether only converted linears see the result now; for a norm that ``convert`` fused."""
        if is_everything_touched() or is_touched(self):
            return False
        return self.reader is not None and self.reader.takes_8_bits()

    def extra_repr(self) -> str:
        """Size, eps, rounding and recipe."""
        return f"{self.weight.numel()}, eps={self.eps}, rounding={self.rounding!r}, recipe={self.recipe.name!r}"


class Float8SwiGLU(nn.Module):
    """The MLP of Llama, ``down_proj(silu(gate_proj(x)) * up_proj(x))``, with 8 bits between its GEMMs.

    Args:
        hidden_size: K.
        intermediate_size: F.
        recipe: a name or a :class:`~tritonfp8.Recipe`, of all three linears.
        device, dtype: of the weights.

    Input ``[..., K]``, a tensor or the result of :class:`Float8RMSNorm`; output ``[..., K]``. Keys of the state_dict:
    ``gate_proj.weight``, ``up_proj.weight``, ``down_proj.weight``, as in ``LlamaMLP``. This reads the weights of the
    linears and does not call them. While a linear has hooks or a bias, or an adapter is in its place, the MLP runs as
    before it was fused, and calls all of them.
    """

    fused_from: type[nn.Module] | None = None
    # The other functions and modules that the forward before called, by attribute.
    fused_reads: dict[str, object] = {}  # noqa: RUF012

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
        linears = self._linears()
        # If a fused norm returned 8 bits, it has just checked this.
        if not (self.fused_from is not None and isinstance(x, QuantizedInput)) and not self.runs_fused():
            return self._unfused(x)
        recipe = linears[0].recipe
        if any(linear.recipe != recipe for linear in linears[1:]):
            names = ", ".join(repr(linear.recipe.name) for linear in linears)
            raise ValueError(f"the three linears of a fused MLP must follow one recipe; got {names}")
        if counting.is_logging:
            counting.calling(*linears)
        gate, up, down = weights = [linear.weight for linear in linears]
        cached = [linear.cached_operands(weight) for linear, weight in zip(linears, weights, strict=True)]
        return swiglu(x, gate, up, down, recipe, quantized_weights=cached)

    def _linears(self) -> tuple[Any, Any, Any]:
        # Past nn.Module.__getattr__, which takes longer.
        get = self._modules.get
        return get("gate_proj"), get("up_proj"), get("down_proj")

    def _unfused(self, x: Any) -> Tensor:
        out: Tensor
        if self.fused_from is not None:
            out = self.fused_from.forward(self, x)
        else:
            out = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out

    def runs_fused(self) -> bool:
        """Whether the three linears are plain converted ones now, and nothing else sees their inputs and results."""
        linears = self._linears()
        if is_everything_touched() or not are_plain(linears):
            return False
        for linear in linears:
            if linear._parameters["bias"] is not None:
                return False
        for name, called in self.fused_reads.items():
            if isinstance(called, nn.Module):
                if self._modules.get(name) is not called or is_touched(called):
                    return False
            elif getattr(self, name, None) is not called:
                return False
        return True
