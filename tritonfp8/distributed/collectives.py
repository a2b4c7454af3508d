"""Collectives on plain tensors, by the name of the process group: the same in eager code and in graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed._functional_collectives
from torch import Tensor

_ops = torch.ops._c10d_functional


def all_reduce(x: Tensor, op: str, group: str) -> Tensor:
    """The reduction of ``x`` over the group: ``"max"`` or ``"sum"``."""
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), op, group))


def _round_up(size: int) -> int:
    # A part can then be viewed in its own dtype without a copy.
    return -(-size // 16) * 16


def all_gather_bytes(parts: Sequence[Tensor], sizes: Sequence[Sequence[int]], group: str) -> list[list[Tensor]]:
    """The bytes of ``parts`` from each rank, in one collective.

    Args:
        parts: this rank's tensors, of any dtypes.
        sizes: for each rank, the bytes of each part.
        group: the name of the process group.

    Returns:
        For each rank, its parts as uint8.
    """
    widest = max(sum(map(_round_up, of_rank)) for of_rank in sizes)
    buffer = parts[0].new_zeros(widest, dtype=torch.uint8)
    start = 0
    for part in parts:
        # 8-bit floats are sent as bytes: not every backend knows them.
        size = part.numel() * part.element_size()
        buffer.narrow(0, start, size).view(part.dtype).copy_(part.flatten())
        start += _round_up(size)
    everyone = _ops.wait_tensor(_ops.all_gather_into_tensor(buffer, len(sizes), group))
    found: list[list[Tensor]] = []
    for rank, of_rank in enumerate(sizes):
        start, here = rank * widest, []
        for size in of_rank:
            here.append(everyone.narrow(0, start, size))
            start += _round_up(size)
        found.append(here)
    return found


def all_to_all_rows(x: Tensor, send: Sequence[int], receive: Sequence[int], group: str) -> Tensor:
    """Send the rows of ``x`` that are for other ranks to them; returns their rows for this rank, from rank 0 on.

    Args:
        x: ``[sum(send), ...]``: first the rows for rank 0.
        send, receive: for each rank the number of rows.
        group: the name of the process group.
    """
    return _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), list(receive), list(send), group))


def reduce_scatter_sum(x: Tensor, dim: int, sizes: Sequence[int], rank: int, group: str) -> Tensor:
    """The sum of ``x`` over the group, scattered along ``dim``: rank i gets ``sizes[i]`` positions."""
    widest = max(sizes)
    if widest == 0:
        return x
    padded = torch.movedim(x, dim, 0)
    if min(sizes) < widest:
        pad = [0, 0] * (x.ndim - 1)
        parts = padded.split(list(sizes))
        padded = torch.cat([torch.nn.functional.pad(part, [*pad, 0, widest - part.shape[0]]) for part in parts])
    mine = _ops.wait_tensor(_ops.reduce_scatter_tensor(padded.contiguous(), "sum", len(sizes), group))
    return torch.movedim(mine.narrow(0, 0, sizes[rank]), 0, dim)


def all_gather_rows(x: Tensor, dim: int, sizes: Sequence[int], group: str) -> Tensor:
    """The tensors of all ranks joined along ``dim``; rank i contributes ``sizes[i]`` positions."""
    widest = max(sizes)
    rows = torch.movedim(x, dim, 0)
    if rows.shape[0] < widest:
        rows = torch.nn.functional.pad(rows, [0, 0] * (x.ndim - 1) + [0, widest - rows.shape[0]])
    everyone = _ops.wait_tensor(_ops.all_gather_into_tensor(rows.contiguous(), len(sizes), group))
    if min(sizes) < widest:
        everyone = torch.cat([everyone.narrow(0, rank * widest, size) for rank, size in enumerate(sizes)])
    return torch.movedim(everyone, 0, dim)
