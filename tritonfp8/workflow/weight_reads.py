"""The GEMMs that read a parameter past the converted layers: other layers, and functions that are given a weight."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tritonfp8.specs.naming import unwrapped
from tritonfp8.workflow.outputs import local_part

# The positions of the two operands. The left one ends with the contraction.
_OPERANDS = {
    "aten.mm": (0, 1),
    "aten.bmm": (0, 1),
    "aten.mv": (0, 1),
    "aten.linear": (0, 1),
    "aten.matmul": (0, 1),
    "aten.addmm": (1, 2),
    "aten.addmv": (1, 2),
    "aten.baddbmm": (1, 2),
    "aten._addmm_activation": (1, 2),
    "aten._scaled_mm": (0, 1),
}
# Whole layers, which multiply their first argument [..., K] by each matrix [N, K] among the others.
_LAYERS = ("aten._transformer_encoder_layer_fwd", "aten._native_multi_head_attention")
_COPIES = ("aten._to_copy", "aten.clone")


class Read(NamedTuple):
    """A way in which a parameter was read: its full names (tied ones share memory), the op, and the op's dtype."""

    parameters: tuple[str, ...]
    op: str
    dtype: str


def matrices(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Each parameter with two or more dims: its full name, its module, and its name there."""
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.ndim >= 2:
                yield unwrapped(".".join(filter(None, (prefix, name)))), module, name


def _storage(x: Tensor) -> StorageWeakRef | None:
    """The identity of a tensor's memory, or of its local shard's; None for a tensor without memory of its own."""
    try:
        return StorageWeakRef(local_part(x).untyped_storage())
    except (NotImplementedError, RuntimeError):
        return None


def _local_share(x: Tensor) -> float:
    """The part of a DTensor's GEMM that this rank computes, if all compute equal parts."""
    mesh = getattr(x, "device_mesh", None)
    return 1.0 if mesh is None else 1 / float(mesh.size())


class WeightReads(TorchDispatchMode):
    """Notes each GEMM of torch that reads a parameter of a model, a copy of it in another dtype included.

    A dispatch mode sees the operations below autograd, in backward and in recomputes, too. It changes no path that
    torch takes: hooks on modules would turn off fused paths.

    Args:
        model: the parameters are looked up at each GEMM, because FSDP2 puts gathered ones in their place.

    Attributes:
        flops: FLOPs (2 M N K a GEMM) of each :class:`Read`.
        forward_flops: those before :attr:`in_backward` was set, by parameter.
        in_backward: whether backward runs.
    """

    # Without this torch refuses higher-order operators, such as flex_attention, inside the mode.
    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: Counter[Read] = Counter()
        self.forward_flops: Counter[tuple[str, ...]] = Counter()
        self.in_backward = False
        self._matrices = list(matrices(model))
        self._copies: dict[StorageWeakRef, tuple[str, ...]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and note what it read."""
        out = func(*args, **(kwargs or {}))
        name = ".".join(str(func).split(".")[:2])
        if name in _OPERANDS:
            left, right = (args[i] for i in _OPERANDS[name])
            flops = 2 * out.numel() * left.shape[-1] * _local_share(out)
            self._note(name, (left, right), [flops, flops])
        elif name in _LAYERS:
            weights = [x for x in args[1:] if isinstance(x, Tensor) and x.ndim == 2]
            rows = args[0].numel() // max(1, args[0].shape[-1])
            self._note(name, weights, [2 * rows * weight.numel() for weight in weights])
        elif name in _COPIES:
            self._follow(args[0], out)
        return out

    def _owners(self) -> dict[StorageWeakRef, tuple[str, ...]]:
        """The names of the parameters by their memory; tied ones share it."""
        owners: defaultdict[StorageWeakRef, tuple[str, ...]] = defaultdict(tuple)
        for full_name, module, name in self._matrices:
            parameter = module._parameters.get(name)
            storage = None if parameter is None else _storage(parameter)
            if storage is not None:
                owners[storage] += (full_name,)
        return owners

    def _names(self, x: Tensor) -> tuple[str, ...]:
        storage = _storage(x)
        if storage is None:
            return ()
        return self._copies.get(storage) or self._owners().get(storage, ())

    def _follow(self, source: Tensor, copy: Tensor) -> None:
        names = self._names(source) if source.ndim >= 2 else ()
        storage = _storage(copy) if names else None
        if storage is not None:
            # The weak reference keeps the identity, not the memory, so no other tensor can get it.
            self._copies[storage] = names

    def _note(self, op: str, operands: Any, flops: Any) -> None:
        for operand, n in zip(operands, flops, strict=True):
            names = self._names(operand)
            if not names:
                continue
            dtype = str(operand.dtype).removeprefix("torch.")
            self.flops[Read(names, op, dtype)] += round(n)
            if not self.in_backward:
                self.forward_flops[names] += round(n)
