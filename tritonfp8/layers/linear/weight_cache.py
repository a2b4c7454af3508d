"""A weight that is quantized once for several passes, and the check that its layer still has that weight."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tritonfp8.compat import torch_private
from tritonfp8.layers.linear.operands import Operands
from tritonfp8.recipes import Recipe

SAMPLES = 4096
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _sample(weight: Tensor) -> Tensor:
    """A view of some elements as integers.

    It has all elements of a small weight; else about :data:`SAMPLES`, at least one of each row and of each column.
    """
    bits = weight.detach().view(_INTEGERS[weight.element_size()])
    if not bits.is_contiguous():
        bits = bits.t()
    rows, columns = bits.shape
    step = max(1, min(bits.numel() // SAMPLES, rows, columns))
    if not bits.is_contiguous():
        return bits[:: math.isqrt(step), :: math.isqrt(step)]
    # A step that shares no factor with the number of columns visits all of them.
    while math.gcd(step, columns) > 1:
        step -= 1
    return bits.view(-1)[::step]


class CachedWeight:
    """A quantized weight, valid while its scope is open (:func:`tritonfp8.quantize_weights_once`).

    Attributes:
        weight: the Parameter that was quantized. It stays alive, so no other can take its memory.
        dtype: the dtype in which the layer computes; the weight was cast to it first.
        recipe: that the weight was quantized for.
        operands: the quantized weight.
        open: whether the scope is open.
        differences: for each element of a sample of the weight, the bits in which it differed at any use.
    """

    def __init__(self, weight: Tensor, dtype: torch.dtype, recipe: Recipe, operands: Operands) -> None:
        self.weight = weight
        self.dtype = dtype
        self.recipe = recipe
        self.operands = operands
        self.open = True
        self._seen = (weight.data_ptr(), _version(weight))
        # A tensor that is made in inference mode cannot be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self._sample = _sample(weight)
            self._bits = self._sample.clone()
            self.differences = torch.zeros_like(self._bits)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # A copy of the layer belongs to no scope, so None is copied in place of this.
        return type(None), ()

    def _compare(self) -> None:
        """Note on the device whether the sample has changed: a write that torch does not count leaves no other trace.

        The scope reads the notes when it ends; reading them here would make the host wait. If threads or streams do
        this at the same time, a difference may be lost, but none is invented.
        """
        if self.operands[0] is None:
            return
        if torch.compiler.is_compiling() or not torch_private.dispatch_mode_count():
            self.differences.bitwise_or_(self._sample ^ self._bits)
        else:
            # Selective checkpointing would save the tensor that is written to here.
            with torch_private.disable_current_modes():
                self.differences.bitwise_or_(self._sample ^ self._bits)

    def check(self, layer: Any) -> None:
        """Raise if ``layer`` would quantize its weight to something else now, as far as the host can tell."""
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
        # A compiled graph has neither addresses nor versions. The scope compares everything when it ends.
        if torch.compiler.is_compiling():
            return
        if weight is not self.weight or self._seen != (weight.data_ptr(), _version(weight)):
            raise RuntimeError(
                "a weight was changed inside quantize_weights_once, and the block still has its old value: change "
                "weights (optimizer.step, load_state_dict) after the block"
            )
