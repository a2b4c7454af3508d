"""How often tensors are quantized, and how much high-precision memory is alive."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

CASTS = ("quantize", "quantize_both", "quantize_both_sum", "quantize_with_amax")


class Casts(TorchDispatchMode):
    """Counts the casts that run, by op."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tritonfp8" and func._opname in CASTS:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def casts_of(function, shape):
    """Number of casts of tensors of this shape in ``function``, and its result."""
    with Casts() as casts:
        out = function()
    return casts.shapes.count(shape), out


class Memory(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside the block and alive together.

    Attributes:
        peak: the most bytes at any time.
    """

    def __init__(self):
        super().__init__()
        self.peak, self._alive = 0, {}

    def counts(self, x):
        """Whether a tensor counts."""
        return type(x) is torch.Tensor and not x.is_meta

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(out):
            if self.counts(x):
                storage = x.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: value for key, value in self._alive.items() if not value[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


class HighPrecisionMemory(Memory):
    """:class:`Memory` of floating tensors of 16 bits or more."""

    def counts(self, x):
        return super().counts(x) and x.is_floating_point() and x.itemsize > 1
