"""Quantize a shard of a weight by the scales of the whole weight, one shard at a time.

:mod:`.grouped` casts many shards in one launch, to the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.distributed.fsdp.orientations import WeightOrientation
from tritonfp8.specs import BLOCKS, ROWWISE, QuantSpec, empty_scale


@dataclass(frozen=True)
class ShardPlace:
    """Where a shard ``[rows, K]`` of a weight lies in the blocks of one orientation.

    Attributes:
        orientation: the orientation.
        start, rows: the first row of the shard in the weight, and the number of its rows.
        lead: rows and columns by which the weight starts inside a block.
        inside: rows and columns by which the shard does.
        first, count: the first block along N that the shard lies in, and the number of blocks.
        reduced: the blocks along N whose amaxes ranks reduce; None for all of the weight.
    """

    orientation: WeightOrientation
    start: int
    rows: int
    lead: tuple[int, int]
    inside: tuple[int, int]
    first: int
    count: int
    reduced: tuple[int, ...] | None


# Blocks of whole rows, whole columns or the whole shard, and the dims that one reduction of torch covers.
_WHOLE = {(1, -1): (1,), (-1, 1): (0,), (-1, -1): (0, 1)}


def _grid_of_shard(x: Tensor, place: ShardPlace, out: Tensor | None = None) -> Tensor:
    """The amaxes of this shard's part of each block that it lies in; a NaN may have any bits."""
    block, (above, left) = place.orientation.block, place.inside
    dims = _WHOLE.get(block)
    if dims is None:
        grid = ops.amax(F.pad(x, (left, 0, above, 0)) if above or left else x, list(block))
        return grid if out is None else out.copy_(grid)
    if out is not None and x.dtype == out.dtype:
        return torch.linalg.vector_norm(x, torch.inf, dims, keepdim=True, out=out)
    grid = torch.linalg.vector_norm(x, torch.inf, dims, keepdim=True).float()
    return grid if out is None else out.copy_(grid)


def one_nan(amax: Tensor) -> Tensor:
    """``amax`` with the positive NaN for every NaN: others may be negative as integers, which a MAX loses."""
    return torch.where(amax.isnan(), torch.nan, amax)


def fill_amax(out: Tensor, x: Tensor, place: ShardPlace) -> None:
    """Write the amaxes of one shard, which ranks reduce next.

    Args:
        out: float32 zeros, ``[number of reduced blocks along N, K blocks]``.
        x: the shard ``[n, K]``, in any floating dtype. Rounding is monotonic: the amax may be rounded after
            the reduction, in place of the shard before it.
        place: where the shard lies.
    """
    if not x.numel():
        return
    if place.reduced is None:
        _grid_of_shard(x, place, out[place.first : place.first + place.count])
        return
    rows, cols = place.orientation.block
    above, left = place.lead
    for index, block in enumerate(place.reduced):
        if place.first <= block < place.first + place.count:
            begin = max(block * rows - above - place.start, 0)
            part = x[begin : min((block + 1) * rows - above - place.start, place.rows)]
            out[index] = ops.amax(F.pad(part, (left, 0)) if left else part, [-1, cols])[0]


def fill_amax_of_tensors(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """As :func:`fill_amax` for tensorwise scales: all ``(out, shard)`` in one kernel."""
    pairs = [(out, x) for out, x in pairs if x.numel()]
    if pairs:
        norms = torch._foreach_norm([x for _, x in pairs], torch.inf)
        torch._foreach_copy_([out.view(()) for out, _ in pairs], norms)


def quantize_shard(x: Tensor, place: ShardPlace, reduced: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a shard ``[n, K]``, n > 0, by the reduced amaxes: the bytes that the whole weight would have there.

    Args:
        x: the shard, in the dtype that the weight is quantized from.
        place: where it lies.
        reduced: as ``out`` of :func:`fill_amax`, after the reduction.

    Returns:
        ``(qdata, scale)`` of the shard, transposed as the orientation is.
    """
    first, orientation = place.first, place.orientation
    amax: Tensor | None = None
    if place.reduced is None:
        amax = reduced[first : first + place.count]
    elif place.reduced:
        amax = one_nan(_grid_of_shard(x, place))
        for index, block in enumerate(place.reduced):
            if first <= block < first + place.count:
                amax[block - first] = reduced[index]
    if amax is not None and orientation.transposed:
        amax = amax.t().contiguous()
    above, left = place.inside
    if above or left:
        x = F.pad(x, (left, 0, above, 0))
    qdata, scale = ops.quantize(x, *orientation.spec.args, orientation.transposed, amax)
    return (qdata[left:, above:] if orientation.transposed else qdata[above:, left:]), scale


def scales_of_amaxes(reduced: Tensor, format: str, scale_rounding: str) -> Tensor:
    """The fp32 scales of any number of amaxes; flat."""
    column = reduced.reshape(-1, 1)
    # A scale depends only on its amax, so any block shape serves.
    spec = QuantSpec(format, ROWWISE, "fp32", scale_rounding)
    return ops.quantize(torch.zeros_like(column), *spec.args, False, column)[1].view(-1)


def scale_of_orientation(
    flat: Tensor, orientation: WeightOrientation, grid: tuple[int, int], shape: tuple[int, int]
) -> Tensor:
    """Flat scales of a weight in the shape and strides of a quantized operand in this orientation.

    Args:
        flat: float32, one scale for each block of the grid.
        orientation: of the operand.
        grid: the number of blocks along N and K.
        shape: N and K, from the beginning of the first block.
    """
    if orientation.transposed and 1 not in grid:
        # Flat in between: dims of size 1 then get the strides of a tensor that was made in this shape.
        flat = flat.view(grid).t().reshape(-1)
    scale, spec = flat.view(orientation.shape(*grid)), orientation.spec
    if not BLOCKS[spec.block].rows_contiguous:
        return scale
    return empty_scale(orientation.shape(*shape), spec.block, spec.scale_format, scale.device).copy_(scale)
