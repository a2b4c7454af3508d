"""Collectives on plain tensors, by the name of the process group: the same in eager code and in graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed._functional_collectives
from torch import Tensor

_ops = torch.ops._c10d_functional


def all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    """The reduction of ``x`` over the group: ``"max"`` or ``"sum"``."""
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), op, group))


def all_gather_each(x: Tensor, shapes: Sequence[Sequence[int]], group: str) -> Tensor | list[Tensor]:
    """The tensors of all ranks: one below the other, ``[ranks, *shape]``, if they have one shape, else a list.

    Args:
        x: this rank's tensor.
        shapes: of the tensor of each rank.
        group: the name of the process group.
    """
    sizes = [math.prod(shape) for shape in shapes]
    widest = max(sizes)
    if widest == 0:
        return [x.new_empty(shape) for shape in shapes]
    if all(tuple(shape) == tuple(shapes[0]) for shape in shapes):
        everyone = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), len(shapes), group))
        return everyone.view(len(shapes), *shapes[0])
    padded = torch.nn.functional.pad(x.flatten(), [0, widest - x.numel()])
    everyone = _ops.wait_tensor(_ops.all_gather_into_tensor(padded, len(shapes), group)).view(len(shapes), widest)
    return [each[:size].view(shape) for each, size, shape in zip(everyone.unbind(), sizes, shapes, strict=True)]


def all_to_all_rows(x: Tensor, send: Sequence[int], receive: Sequence[int], group: str) -> Tensor:
    """Send the rows of ``x`` that are for other ranks to them; returns their rows for this rank, from rank 0 on.

    Args:
        x: ``[sum(send), ...]``: first the rows for rank 0.
        send, receive: for each rank the number of rows.
        group: the name of the process group.
    """
    return _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), list(receive), list(send), group))


def reduce_scatter_sum(parts: Tensor | Sequence[Tensor], rank: int, group: str) -> Tensor:
    """The sum over the group of the part for this rank: ``parts`` has one for each, ``[ranks, rows, ...]`` if alike."""
    sizes = [part.shape[0] for part in parts]
    widest = max(sizes)
    if widest == 0:
        return parts[rank]
    if isinstance(parts, Tensor):
        whole = parts.flatten(0, 1)
    else:
        pad = [0, 0] * (parts[0].ndim - 1)
        whole = torch.cat([torch.nn.functional.pad(part, [*pad, 0, widest - part.shape[0]]) for part in parts])
    mine = _ops.wait_tensor(_ops.reduce_scatter_tensor(whole.contiguous(), "sum", len(sizes), group))
    return mine.narrow(0, 0, sizes[rank])
