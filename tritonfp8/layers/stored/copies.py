"""Stored weights as bytes: what pickle sends to another process, and what FSDP2 sends to other ranks."""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch import Tensor, nn

# Float32 scales behind codes must begin at a multiple of 4 bytes; TMA reads from multiples of 16.
_ALIGNMENT = 16


def reduced(x: Any, protocol: Any) -> tuple[Any, ...]:
    """``__reduce_ex__`` of a stored tensor: its inner tensors, and its attributes.

    pickle does not know memory of 8-bit floats, so they are sent as bytes.
    """
    names, context = x.__tensor_flatten__()
    inner = {name: getattr(x, name) for name in names}
    sent = {name: (t.view(torch.uint8) if t.itemsize == 1 else t, t.dtype) for name, t in inner.items()}
    others = {name: value for name, value in x.__dict__.items() if name not in inner}
    return _made, (type(x), sent, context, x.requires_grad, isinstance(x, nn.Parameter), others)


def _made(
    cls: Any,
    sent: dict[str, tuple[Tensor, torch.dtype]],
    context: Any,
    requires_grad: bool,
    is_parameter: bool,
    others: dict[str, Any],
) -> Tensor:
    x = cls.__tensor_unflatten__({name: t.view(dtype) for name, (t, dtype) in sent.items()}, context, None, None)
    found: Tensor = nn.Parameter(x, requires_grad) if is_parameter else x.requires_grad_(requires_grad)
    found.__dict__.update(others)
    return found


class Gathered:
    """The all-gather hooks of a shard, which FSDP2 calls by name: codes and scales are sent as bytes.

    The class that inherits from it is a tensor with rows, or experts, along dim 0.
    """

    shape: torch.Size
    # The size of dim 0 of all shards together, if this is a shard of FSDP2.
    total: int | None
    # Whether tritonfp8.distributed has checked how FSDP2 gathers it.
    is_checked = False

    def as_bytes(self) -> tuple[Tensor, Tensor]:
        """Codes and scales as uint8, not copied; dim 0 is that of the tensor."""
        raise NotImplementedError

    def _of_gathered(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """The whole weight over the gathered bytes, views of them."""
        raise NotImplementedError

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        """The bytes that this rank sends, as many on every rank."""
        if not self.is_checked:
            importlib.import_module("tritonfp8.distributed").check_stored_gather(self)
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
