"""Quantize a shard of a weight by the scales of the whole weight, one shard at a time.

:mod:`.grouped` casts many shards in one launch, to the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.distributed.fsdp.byte_layout import ByteLayout, WeightOrientation, write_rank_segment
from tritonfp8.specs import BLOCKS, ROWWISE, QuantSpec, empty_scale


def _lead(layout: ByteLayout, orientation: WeightOrientation, rank: int) -> tuple[int, int]:
    """Rows and columns by which the shard starts inside a block."""
    above, left = layout.lead(orientation)
    return (layout.shard(rank)[0] + above) % orientation.block[0] if orientation.block[0] > 1 else 0, left


def _aligned(x: Tensor, above: int, left: int) -> Tensor:
    return F.pad(x, (left, 0, above, 0)) if above or left else x


# Blocks of whole rows, whole columns or the whole shard, and the dims that one reduction of torch covers.
_WHOLE = {(1, -1): (1,), (-1, 1): (0,), (-1, -1): (0, 1)}


def _grid_of_shard(
    x: Tensor, layout: ByteLayout, orientation: WeightOrientation, rank: int, out: Tensor | None = None
) -> Tensor:
    """The amaxes of this shard's part of each block that it lies in; a NaN may have any bits."""
    dims = _WHOLE.get(orientation.block)
    if dims is None:
        grid = ops.amax(_aligned(x, *_lead(layout, orientation, rank)), list(orientation.block))
        return grid if out is None else out.copy_(grid)
    if out is not None and x.dtype == out.dtype:
        return torch.linalg.vector_norm(x, torch.inf, dims, keepdim=True, out=out)
    grid = torch.linalg.vector_norm(x, torch.inf, dims, keepdim=True).float()
    return grid if out is None else out.copy_(grid)


def one_nan(amax: Tensor) -> Tensor:
    """``amax`` with the positive NaN for every NaN: others may be negative as integers, which a MAX loses."""
    return torch.where(amax.isnan(), torch.nan, amax)


def fill_amax(out: Tensor, x: Tensor, layout: ByteLayout, orientation: WeightOrientation, rank: int) -> None:
    """Write the amaxes of one shard, which ranks reduce next.

    Args:
        out: float32 zeros, ``[len(layout.reduced(orientation)), K blocks]``.
        x: the shard ``[n, K]``, in any floating dtype. Rounding is monotonic: the amax may be rounded after
            the reduction, in place of the shard before it.
        layout, orientation, rank: which shard this is, and how a GEMM reads it.
    """
    first, count = layout.blocks(orientation, rank)
    if not x.numel():
        return
    if _reduces_all(layout, orientation):
        _grid_of_shard(x, layout, orientation, rank, out[first : first + count])
        return
    start, rows = layout.shard(rank)
    above, left = layout.lead(orientation)
    for index, block in enumerate(layout.reduced(orientation)):
        if first <= block < first + count:
            begin = max(block * orientation.block[0] - above - start, 0)
            end = min((block + 1) * orientation.block[0] - above - start, rows)
            out[index] = ops.amax(_aligned(x[begin:end], 0, left), [-1, orientation.block[1]])[0]


def fill_amax_of_tensors(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """As :func:`fill_amax` for tensorwise scales: all ``(out, shard)`` in one kernel."""
    pairs = [(out, x) for out, x in pairs if x.numel()]
    if pairs:
        norms = torch._foreach_norm([x for _, x in pairs], torch.inf)
        torch._foreach_copy_([out.view(()) for out, _ in pairs], norms)


def _reduces_all(layout: ByteLayout, orientation: WeightOrientation) -> bool:
    return isinstance(layout.reduced(orientation), range)


def _amax_of_shard(
    x: Tensor, layout: ByteLayout, orientation: WeightOrientation, rank: int, reduced: Tensor
) -> Tensor | None:
    """The global amaxes of the shard's blocks; None if the shard has all blocks as a whole."""
    first, count = layout.blocks(orientation, rank)
    if _reduces_all(layout, orientation):
        return reduced[first : first + count]
    if not reduced.shape[0]:
        return None
    amax = one_nan(_grid_of_shard(x, layout, orientation, rank))
    for index, block in enumerate(layout.reduced(orientation)):
        if first <= block < first + count:
            amax[block - first] = reduced[index]
    return amax


def quantize_shard(
    x: Tensor, layout: ByteLayout, orientation: WeightOrientation, rank: int, reduced: Tensor
) -> tuple[Tensor, Tensor]:
    """Quantize a shard ``[n, K]``, n > 0, by the reduced amaxes: the bytes that the whole weight would have there.

    Returns:
        ``(qdata, scale)`` of the shard, transposed as the orientation is.
    """
    amax = _amax_of_shard(x, layout, orientation, rank, reduced)
    if amax is not None and orientation.transposed:
        amax = amax.t().contiguous()
    above, left = _lead(layout, orientation, rank)
    qdata, scale = ops.quantize(_aligned(x, above, left), *orientation.spec.args, orientation.transposed, amax)
    return (qdata[left:, above:] if orientation.transposed else qdata[above:, left:]), scale


def scales_of_amaxes(reduced: Tensor, format: str, scale_rounding: str) -> Tensor:
    """The fp32 scales of any number of amaxes; flat."""
    column = reduced.reshape(-1, 1)
    # A scale depends on its amax alone, so any block shape serves.
    spec = QuantSpec(format, ROWWISE, "fp32", scale_rounding)
    return ops.quantize(torch.zeros_like(column), *spec.args, False, column)[1].view(-1)


def scale_of_orientation(flat: Tensor, layout: ByteLayout, orientation: WeightOrientation) -> Tensor:
    """Flat scales of a weight in the shape and strides of a quantized operand in this orientation."""
    grid = layout.grid(orientation)
    if orientation.transposed and 1 not in grid:
        # Flat in between: dims of size 1 then get the strides of a tensor that was made in this shape.
        flat = flat.view(grid).t().reshape(-1)
    scale = flat.view(grid[::-1] if orientation.transposed else grid)
    spec = orientation.spec
    if not BLOCKS[spec.block].rows_contiguous:
        return scale
    above, left = layout.lead(orientation)
    rows, cols = above + layout.rows, left + layout.cols
    shape = (cols, rows) if orientation.transposed else (rows, cols)
    return empty_scale(shape, spec.block, spec.scale_format, scale.device).copy_(scale)


def rank_segment(layout: ByteLayout, rank: int, shard: Tensor, reduced: Mapping[WeightOrientation, Tensor]) -> Tensor:
    """The bytes that a rank sends: its shard in the given orientations.

    Args:
        layout: of the gathered bytes.
        rank: which shard this is.
        shard: ``[n, K]``, in the dtype that the weight is quantized from; n may be 0.
        reduced: the reduced amaxes of each orientation to send.

    Returns:
        Flat uint8, as long on each rank.
    """
    parts = []
    if shard.shape[0]:
        parts = [(o, *quantize_shard(shard, layout, o, rank, amaxes)) for o, amaxes in reduced.items()]
    if len(parts) == 1 and parts[0][1].numel() == layout.rank_segment_size:
        return parts[0][1].view(torch.uint8).reshape(-1)
    segment = torch.zeros(layout.rank_segment_size, dtype=torch.uint8, device=shard.device)
    for part in parts:
        write_rank_segment(segment, layout, *part)
    return segment
