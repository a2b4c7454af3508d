"""A weight that is quantized once for several passes, and the check that its layer still has that weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonfp8.compat import torch_private
from tritonfp8.layers.unsupported import refuse_transform
from tritonfp8.recipes import Recipe

SAMPLES = 4096
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version


def _bits(x: Tensor) -> Tensor:
    """The values of ``x`` as a matrix of integers, without a copy if ``x`` has two dims."""
    matrix = x.detach()
    # A rank without experts has a shard without rows, whose columns a reshape could not tell.
    matrix = matrix.flatten(1) if x.ndim > 2 else matrix.reshape(1, -1) if x.ndim < 2 else matrix
    return matrix.view(_INTEGERS[x.element_size()])


def sample_of(x: Tensor) -> Tensor:
    """Some elements as integers; a view if ``x`` has two dims and a dense layout.

    It has all elements of a small tensor; else about :data:`SAMPLES`, at least one of each row and of each column.
    """
    bits = _bits(x)
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


def _sums(x: Tensor) -> tuple[Tensor, Tensor]:
    bits = _bits(x)
    return bits.sum(0, dtype=torch.int64), bits.sum(1, dtype=torch.int64)


class Watch:
    """Notices whether tensors change.

    The host sees a change that torch counts. For any other change a sample is compared at each use, and at the end the
    sums of the bits of each row and of each column.

    Args:
        find: returns the tensors; called at each check, since others may have taken their place. Of a DTensor this
            rank's part is watched.

    Attributes:
        differences: for each tensor, the bits in which each element of its sample differed at any use.
    """

    def __init__(self, find: Callable[[], Sequence[Tensor]]) -> None:
        self._find = find
        # They stay alive, so no others can take their memory.
        self._tensors = list(find())
        self._seen = [_stamp(x) for x in self._tensors]
        # A tensor that is made in inference mode cannot be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self._samples = [sample_of(_local(x)) for x in self._tensors]
            self._bits = [x.clone() for x in self._samples]
            self._sums = [_sums(_local(x)) for x in self._tensors]
            self.differences = [torch.zeros_like(x) for x in self._bits]

    def is_written(self) -> bool:
        """Whether torch counted a write, or other tensors took the place of these."""
        return self._is_replaced() or [_stamp(x) for x in self._tensors] != self._seen

    def _is_replaced(self) -> bool:
        now = self._find()
        return len(now) != len(self._tensors) or any(x is not y for x, y in zip(now, self._tensors, strict=True))

    def note(self, now: Sequence[Tensor] | None = None) -> None:
        """Compare the samples on the device: of the tensors, or of ``now``, which stands for them.

        :meth:`has_changed` reads the notes; reading them here would make the host wait. If threads or streams do this
        at the same time, a difference may be lost, but none is invented.
        """
        samples = self._samples if now is None else [sample_of(x) for x in now]
        for sample, bits, differences in zip(samples, self._bits, self.differences, strict=True):
            differences.bitwise_or_(sample ^ bits)

    def has_changed(self) -> bool:
        """Whether some tensor has other values now, or had them at some use. The host waits for the device."""
        if self._is_replaced():
            return True
        flags = [x.any() for x in self.differences]
        for x, sums in zip(self._tensors, self._sums, strict=True):
            flags += [(a != b).any() for a, b in zip(_sums(_local(x)), sums, strict=True)]
        return any(flag.item() for flag in flags)


def _local(x: Tensor) -> Tensor:
    local: Tensor = getattr(x, "_local_tensor", x)
    return local


def _stamp(x: Tensor) -> tuple[int, int | None, int | None]:
    # A write to a DTensor may be counted there only, a write to its local tensor is.
    local = _local(x)
    return local.data_ptr(), _version(x), _version(local)


class CachedWeight:
    """A quantized weight, valid while its scope is open (:func:`tritonfp8.quantize_weights_once`).

    Attributes:
        dtype: the dtype in which the layer computes; the weight was cast to it first.
        recipe: that the weight was quantized for.
        operands: the quantized weight, as :func:`tritonfp8.functional.linear` takes it, or that of experts, as
            :func:`tritonfp8.functional.grouped_linear` does.
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
