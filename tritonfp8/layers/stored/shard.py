"""What all parts of stored weights have: the hooks by which FSDP2 gathers their bytes, and operations that cut them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from tritonfp8.layers.extensions import distributed
from tritonfp8.layers.stored.base import StoredTensor

aten = torch.ops.aten
# Float32 scales behind codes must begin at a multiple of 4 bytes; TMA reads from multiples of 16.
_ALIGNMENT = 16


class Shard(StoredTensor):
    """A part of a stored weight, with rows, or experts, along dim 0: what FSDP2, DTensor and checkpoints do with it.

    FSDP2 calls its all-gather hooks by name; codes and scales are sent as bytes.
    """

    is_part = True
    # The size of dim 0 of all shards together, if this is a shard of FSDP2.
    total: int | None
    # Whether tritonfp8.distributed has checked how FSDP2 gathers it.
    is_checked = False
    # Codes and scales as uint8, not copied; dim 0 is dim 0 of the tensor.
    as_bytes: Callable[[], tuple[Tensor, Tensor]]

    def _of_gathered(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The whole weight over the gathered bytes, views of them."""
        raise NotImplementedError

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        """The bytes that this rank sends, as many on every rank."""
        if not self.is_checked:
            distributed().check_gather(self)
            self.is_checked = True
        total = self.shape[0] if self.total is None else self.total
        # With torch's replicate, a rank has more than a shard of this mesh: all of the weight.
        size = max(-(-total // mesh.size()), self.shape[0])
        sent = tuple(_extended(x, size) for x in self.as_bytes())
        # FSDP2 sends nothing if a shard is the whole, and hands on the first tensor only.
        return (_joined(*sent),) if size == total else sent, None

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: None, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """The gathered weight, a view of the gathered bytes; FSDP2 cuts off what fills uneven shards."""
        if out is not None:
            # It is a view of the same memory, which FSDP2 has filled again.
            return None
        codes, scales = outputs if len(outputs) > 1 else self._parted(outputs[0])
        return self._of_gathered(codes, scales, param_dtype), ()

    def _parted(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of :func:`_joined`, of the whole weight: views of the buffer."""
        total = self.shape[0] if self.total is None else self.total
        codes, scales = ((total, *x.shape[1:]) for x in self.as_bytes())
        sizes = math.prod(codes), math.prod(scales)
        return buffer[: sizes[0]].view(codes), buffer[_start_of_scales(sizes[0]) :][: sizes[1]].view(scales)

    def _zeros(self, size: Any, device: Any, total: int | None) -> Tensor:
        """A shard of this size that holds zeros."""
        raise NotImplementedError

    def _cut(self, dim: int, start: int, end: int, step: int) -> Tensor:
        """``Tensor[start:end:step]`` of a dim, where codes and scales can be cut so."""
        raise NotImplementedError

    def _between(self, start: int, end: int) -> Self:
        """These rows, or experts, in the same memory."""
        codes, scales = (x[start:end] for x in self._both())
        found = self._with(codes, scales)
        found._row_scale = None if self._row_scale is None else self._row_scale[start:end]
        return found

    def _same(self) -> Self:
        found = super()._same()
        found._row_scale = self._row_scale
        return found

    def _split(self, size: int, dim: int = 0) -> list[Any]:
        """``Tensor.split``; at least one part, which may be empty."""
        dim %= self.ndim
        n = self.shape[dim]
        return [self._cut(dim, at, min(at + size, n), 1) for at in range(0, max(n, 1), max(size, 1))]


def _viewed(x: Any, size: Any, *others: Any) -> Any:
    """A view of the same shape. FSDP2 also keeps a flat one, which it reads for plain tensors only."""
    if tuple(size) in (tuple(x.shape), (-1,)):
        return x._same()
    raise NotImplementedError(f"a view {tuple(size)} of {x} does not work on a weight that is stored in 8 bits")


def _first(x: Any, size: Any, *others: Any) -> Any:
    """The first rows, or experts, which FSDP2 cuts out of what it gathered."""
    fits = tuple(size[1:]) == tuple(x.shape[1:]) and size[0] <= x.shape[0]
    return x._cut(0, 0, size[0], 1) if fits else _viewed(x, size)


def _slice(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    first, last, by = slice(start, end, step).indices(x.shape[dim])
    return x._cut(dim % x.ndim, first, max(first, last), by)


def _new(x: Any, size: Any, device: Any = None, **options: Any) -> Any:
    """Memory for a shard, as FSDP2 makes it; for a part without elements, as DTensor does."""
    if len(size) != x.ndim or (x.ndim == 3 and tuple(size[1:]) != tuple(x.shape[1:])):
        return torch.zeros(size, dtype=x.dtype, device=device or x.device)
    total = x.shape[0] if x.total is None else x.total
    return x._zeros(size, device or x.device, total if math.prod(size) else None)


OF_SHARDS: dict[Any, Callable[..., Any]] = {
    aten._pin_memory.default: lambda x, *others: x._with(*(each.pin_memory() for each in x._both())),
    aten._to_copy.default: lambda x, **options: x._to(**options),
    aten.alias.default: lambda x: x._same(),
    aten.as_strided.default: _first,
    aten.clone.default: lambda x, **options: x._with(*(each.clone(**options) for each in x._both())),
    aten.detach.default: lambda x: x._same(),
    aten.empty_like.default: lambda x, device=None, **options: x._zeros(x.shape, device or x.device, x.total),
    aten.is_pinned.default: lambda x, *others: x._qdata.is_pinned(),
    aten.new_empty.default: _new,
    aten.new_zeros.default: _new,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: lambda x, size, dim=0: x._split(size, dim),
    aten.view.default: _viewed,
}
"""What operations of torch do with a shard; a derived class may know others."""


def _extended(x: Tensor, size: int) -> Tensor:
    """``x`` with zeros behind it, up to this size of dim 0."""
    missing = size - x.shape[0]
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def _start_of_scales(codes: int) -> int:
    return -(-codes // _ALIGNMENT) * _ALIGNMENT


def _joined(codes: Tensor, scales: Tensor) -> Tensor:
    """Both in one buffer: a copy, free again when FSDP2 has copied it."""
    gap = codes.new_zeros(_start_of_scales(codes.numel()) - codes.numel())
    return torch.cat([codes.reshape(-1), gap, scales.reshape(-1)])
