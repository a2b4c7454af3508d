"""A weight that is quantized once for several passes, and the check that its layer still has that weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonfp8.compat import torch_private
from tritonfp8.layers.changes import Watch
from tritonfp8.layers.unsupported import refuse_transform
from tritonfp8.recipes import Recipe


class CachedWeight:
    """A quantized weight, valid while its scope is open (:func:`tritonfp8.quantize_weights_once`).

    Attributes:
        dtype: the dtype in which the layer computes; the weight was cast to it first.
        recipe: that the weight was quantized for.
        operands: the quantized weight, as :func:`tritonfp8.functional.linear` takes it, or the quantized weight of
            experts, as :func:`tritonfp8.functional.grouped_linear` takes it.
        open: whether the scope is open.
        stored: the tensors that decide the weight: the Parameter itself, the rank's shard of it, or what its
            parametrization computes it from. None where no GEMM reads the weight in 8 bits.
        computed: the weight that a parametrization computed; else None. Each use computes it again, for autograd.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        recipe: Recipe,
        operands: Any,
        stored: Callable[[], Sequence[Tensor]],
        computed: Tensor | None = None,
    ) -> None:
        self.dtype = dtype
        self.recipe = recipe
        self.operands = operands
        self.open = True
        is_read = recipe.output.rhs is not None or recipe.grad_input.rhs is not None
        self.stored = Watch(stored) if is_read else None
        self.computed = Watch(lambda: [computed]) if is_read and computed is not None else None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # A copy of the layer belongs to no scope, so None is copied in place of this.
        return type(None), ()

    def _note(self, weight: Tensor) -> None:
        assert self.stored is not None
        self.stored.note()
        if self.computed is not None:
            self.computed.note([weight])

    def of(self, layer: Any, weight: Tensor) -> Any:
        """The operands of the layer's weight; None after the scope, which a copy of the layer may outlive."""
        if not self.open:
            return None
        self.check(layer, weight)
        return self.operands

    def check(self, layer: Any, weight: Tensor) -> None:
        """Raise if ``layer`` would quantize ``weight`` to something else now, as far as the host can tell."""
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
        if self.stored is None:
            return
        transformed = not torch.compiler.is_compiling() and torch_private.is_transformed()
        if transformed and self.computed is not None:
            refuse_transform("a parametrized weight that is quantized once", "Leave out quantize_weights_once")
        if torch.compiler.is_compiling() or not (transformed or torch_private.dispatch_mode_count()):
            self._note(weight)
        else:
            # Selective checkpointing would save the tensors that are written to here, and torch.func forbids the write.
            with torch_private.disable_current_modes(), torch_private.outside_transforms():
                self._note(weight)
        # A compiled graph has neither addresses nor versions. The scope compares everything when it ends.
        if not torch.compiler.is_compiling() and self.stored.is_written():
            raise RuntimeError(
                "a weight was changed inside quantize_weights_once, and the block still has its old value: change "
                "weights (optimizer.step, load_state_dict) after the block"
            )

    def has_changed(self) -> bool:
        """Whether the weight has other values now, or had them at some use. The host waits for the device."""
        return any(watch is not None and watch.has_changed() for watch in (self.stored, self.computed))
