"""Float8Linear: nn.Linear with a recipe."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from tritonfp8.autograd_fused import QuantizedInput, check_whole, is_distributed, quantized_linear
from tritonfp8.functional import Operands, SharedInput, linear
from tritonfp8.recipes import Recipe, get
from tritonfp8.specs import require_type

SAMPLES = 4096
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_NO_RECIPE = (
    "a Float8Linear was made without recipe= and follows 'rowwise'. A class does not carry the recipe of the layer "
    "that it was taken from: give recipe=layer.recipe, or recipe='rowwise' if that is meant"
)


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _sample(weight: Tensor) -> Tensor:
    """A view of some elements as integers: all of a small weight, else one or more of each row and of each column.

    As many as :data:`SAMPLES`, or as the longer side has.
    """
    bits = weight.detach().view(_INTEGERS[weight.element_size()])
    if not bits.is_contiguous():
        bits = bits.t()
    rows, columns = bits.shape
    step = max(1, min(bits.numel() // SAMPLES, rows, columns))
    if not bits.is_contiguous():
        return bits[:: math.isqrt(step), :: math.isqrt(step)]
    # A step without a common factor with the columns walks over all of them.
    while math.gcd(step, columns) > 1:
        step -= 1
    return bits.view(-1)[::step]


class HeldWeight:
    """A weight quantized ahead, while the scope that owns it is open (:func:`tritonfp8.quantize_weights_once`).

    Attributes:
        weight: the Parameter that was quantized. It stays alive, so no other can take its memory.
        dtype: in which the layer computes: the weight was cast to it first.
        recipe: that it was quantized for.
        operands: the result.
        open: whether the scope is.
        differences: for each element of a sample of the weight, the bits in which it differed at any use.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype, recipe: Recipe, operands: Operands) -> None:
        self.weight = weight
        self.dtype = dtype
        self.recipe = recipe
        self.operands = operands
        self.open = True
        self._seen = (weight.data_ptr(), _version(weight))
        # What is made in inference mode could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self._sample = _sample(weight)
            self._bits = self._sample.clone()
            self.differences = torch.zeros_like(self._bits)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # A copy of the layer belongs to no scope: it holds None.
        return type(None), ()

    def _compare(self) -> None:
        """Note on the device whether the sample is as it was: a write that torch does not count leaves no other trace.

        The scope reads the notes when it ends: doing so here would stop the host. Threads and streams may do this at
        once: a difference can be lost then, and none can be made up.
        """
        if self.operands[0] is None:
            return
        if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
            self.differences.bitwise_or_(self._sample ^ self._bits)
        else:
            # Selective checkpointing would keep what is written to here.
            with _disable_current_modes():
                self.differences.bitwise_or_(self._sample ^ self._bits)

    def check(self, layer: Float8Linear) -> None:
        """Raise unless this is what ``layer`` would quantize now, as far as can be seen without reading the weight."""
        weight = layer.weight
        if layer.recipe != self.recipe:
            raise RuntimeError("the recipe was changed inside quantize_weights_once: swap recipes outside the block")
        device = weight.device.type
        autocast = torch.is_autocast_enabled(device)
        computed = torch.get_autocast_dtype(device) if autocast else weight.dtype
        if computed != self.dtype:
            raise RuntimeError(
                f"the layer computes in {computed}, and quantize_weights_once quantized its weight from {self.dtype}: "
                "open the block inside torch.autocast, or give it dtype="
            )
        self._compare()
        # Neither can be asked for in a compiled graph. The scope compares everything when it ends.
        if torch.compiler.is_compiling():
            return
        if weight is not self.weight or self._seen != (weight.data_ptr(), _version(weight)):
            raise RuntimeError(
                "a weight was changed inside quantize_weights_once, where its old value is still held: change weights "
                "(optimizer.step, load_state_dict) after the block"
            )


def require_module(model: object) -> None:
    """Raise TypeError unless ``model`` is a module."""
    require_type("model", model, nn.Module, "an nn.Module")


class Float8Linear(nn.Linear):
    """``nn.Linear`` whose three GEMMs follow a recipe: same parameters, same state_dict keys, same initialization.

    Args:
        in_features, out_features, bias, device, dtype: as ``nn.Linear``.
        recipe: a name or a :class:`~tritonfp8.Recipe`. Without one it is ``"rowwise"``, with a FutureWarning: code that
            makes a layer like another as ``type(layer)(in_features, out_features)`` leaves its recipe behind.

    Input ``[..., in_features]``, a tensor or what a fused norm of the same recipe returns; output
    ``[..., out_features]``. Saved for backward, for M rows of input and K in_features: ``input.T`` in 8 bits, M K bytes
    and scales, or 2 M K bytes (bf16) where the recipe keeps grad_weight in high precision; nothing if the weight needs
    no grad. See :func:`tritonfp8.functional.linear` for dtypes and errors.
    """

    recipe: Recipe
    shared_input: SharedInput | None = None
    held_weight: HeldWeight | None = None
    # Whether a fused norm makes the input, or a fused MLP reads the weight.
    is_fused: bool = False
    # What tritonfp8.revert calls first, where something was prepared for this layer. If it returns a function, that
    # undoes it: called when revert fails after all.
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
        """As ``nn.Module``; but a parallel style shards a layer by this, which fused ones do not take.

        Raises:
            TypeError: a DTensor for a fused layer whose parameter was a plain tensor.
        """
        # One in the place of another is of FSDP2, which gathers it again.
        if self.is_fused and not is_distributed(self._parameters.get(name)):
            check_whole(param)
        super().register_parameter(name, param)

    def forward(self, input: Tensor | QuantizedInput) -> Tensor:
        """``input @ weight.T + bias`` by the recipe."""
        held = self.held_operands()
        if isinstance(input, QuantizedInput):
            return quantized_linear(input, self.weight, self.bias, self.recipe, quantized_weight=held)
        return linear(input, self.weight, self.bias, self.recipe, quantized_weight=held, shared_input=self.shared_input)

    def held_operands(self) -> Operands | None:
        """The weight quantized ahead, inside :func:`tritonfp8.quantize_weights_once`."""
        held = self.held_weight
        # A shallow copy of the layer may outlive the scope.
        if held is None or not held.open:
            return None
        held.check(self)
        return held.operands

    def extra_repr(self) -> str:
        """The fields of ``nn.Linear`` and the recipe."""
        return f"{super().extra_repr()}, recipe={self.recipe.name!r}"
