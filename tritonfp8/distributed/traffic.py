"""Count the bytes that collectives carry."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

# The names of torch's two sets of collectives (c10d and functional), by kind.
_KINDS = {
    "all_gather": ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_", "all_gather_into_tensor",
                   "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced"),
    "all_reduce": ("allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_", "all_reduce_coalesced"),
    "reduce_scatter": ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_",
                       "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"),
    "all_to_all": ("alltoall_", "alltoall_base_", "all_to_all_single"),
    "broadcast": ("broadcast_", "broadcast"),
}  # fmt: skip
_KIND_OF = {op: kind for kind, ops in _KINDS.items() for op in ops}


class count_collective_bytes(TorchDispatchMode):
    """Count the bytes of this rank's collectives inside the ``with`` block, in forward and backward, also FSDP's::

        with count_collective_bytes() as traffic:
            model(batch).backward()
        traffic.bytes["all_gather"]

    Attributes:
        bytes: by kind (``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``broadcast``), the size of
            the larger side on one rank: the gathered result of an all-gather, the input of a reduce-scatter, else the
            tensor. A ring moves ``(W - 1) / W`` of that over each rank's link, twice that in an all-reduce.
        calls: by kind, the number of collectives.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._inside = False

    def __enter__(self) -> Any:
        _counting.append(self)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        _counting.remove(self)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs compiled: under a mode that does not say this, torch would run it eagerly."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            # DTensor handles the op next, with this mode on: the collectives of the op then arrive here.
            return NotImplemented
        before, self._inside = self._inside, True
        try:
            out = func(*args, **(kwargs or {}))
        finally:
            self._inside = before
        if not isinstance(func, torch._ops.OpOverload):
            # A higher-order operator, such as the one around recomputed random numbers.
            return out
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional"):
            kind = _KIND_OF.get(name)
            if kind is not None:
                sides = [_nbytes(x) for x in (*args, *(kwargs or {}).values(), out)]
                self.bytes[kind] += max(sides)
                self.calls[kind] += 1
        return out


_counting: list[count_collective_bytes] = []


@contextlib.contextmanager
def counted_inside_ops() -> Iterator[None]:
    """Count collectives that an op of this package calls: while an op runs, modes that saw its call are off."""
    with contextlib.ExitStack() as stack:
        for counter in [counter for counter in _counting if counter._inside]:
            stack.enter_context(counter)
        yield


def _nbytes(value: Any) -> int:
    return sum(x.nbytes for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor))
