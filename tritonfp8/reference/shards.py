"""Casts of many shards of weights, shard by shard; see the rows of the ops for what an entry of ``places`` holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tritonfp8.reference import casts
from tritonfp8.specs import spec_of, transposed


def _grid(amaxes: Tensor, shard: Tensor, block: Sequence[int], place: Sequence[int]) -> Tensor:
    """The amaxes of the blocks that a shard lies in, as a view ``[blocks along N, blocks along K]``."""
    first, grid_cols, row, col = place
    starts, counts = [], []
    for size, start, step in zip(shard.shape, (row, col), block, strict=True):
        starts.append(0 if step == -1 else start // step)
        counts.append(1 if step == -1 else -(-size // step))
    return amaxes.as_strided(counts, (grid_cols, 1), first + starts[0] * grid_cols + starts[1])


def amax_of_shards(amaxes: Tensor, shards: Sequence[Tensor], places: Tensor, blocks: Sequence[int]) -> None:
    """Raise amaxes to the amaxes of the shards, in one or two orientations.

    Args:
        amaxes: float32, flat, written to; zeros where no shard was read yet. A NaN may get any bits.
        shards: each ``[n, k]``, contiguous, of one dtype.
        places: int64 ``[shards, 4 * orientations]``.
        blocks: rows and columns of each orientation's block, in the coordinates of the shards.
    """
    bits = amaxes.view(torch.int32)
    for shard, fields in zip(shards, places.tolist(), strict=True):
        for i in range(0, len(blocks), 2) if shard.numel() else ():
            block, place = blocks[i : i + 2], fields[2 * i : 2 * i + 4]
            target = _grid(bits, shard, block, place)
            # The bits of non-negative floats are ordered as integers, with NaN above infinity.
            target.copy_(torch.maximum(target, casts.amax(shard, block).view(torch.int32)))


def quantize_shards(
    out: Tensor,
    shards: Sequence[Tensor],
    places: Tensor,
    amaxes: Tensor,
    spec: str,
    transpose: bool,
    rounded: torch.dtype,
) -> None:
    """Quantize shards by given amaxes, each to its place in one buffer of bytes.

    Args:
        out: uint8, flat, written to.
        shards: each ``[n, k]``, contiguous, of one dtype.
        places: int64 ``[shards, 6]``.
        amaxes: float32, flat; every NaN is the positive one.
        spec: the text of a :class:`~tritonfp8.QuantSpec`.
        transpose: whether the transpose of each shard is quantized and written.
        rounded: the dtype to which elements are rounded first.
    """
    block = spec_of(spec).block
    for shard, (offset, stride, *place) in zip(shards, places.tolist(), strict=True):
        if shard.numel():
            amax = _grid(amaxes, shard, transposed(block) if transpose else block, place)
            amax = (amax.t() if transpose else amax).contiguous()
            qdata, _ = casts.quantize(shard.to(rounded), spec, transpose, amax)
            out.as_strided(qdata.shape, (stride, 1), offset).copy_(qdata.view(torch.uint8))
