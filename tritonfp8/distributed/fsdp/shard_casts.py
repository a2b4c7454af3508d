"""Quantize a shard of a weight by the scales of the whole weight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.distributed.fsdp.byte_layout import Form, Layout
from tritonfp8.specs import BLOCKS, ROWWISE, QuantSpec, empty_scale


def _lead(layout: Layout, form: Form, rank: int) -> tuple[int, int]:
    """Rows and columns by which the shard starts inside a block."""
    above, left = layout.lead(form)
    return (layout.shard(rank)[0] + above) % form.block[0] if form.block[0] > 1 else 0, left


def _aligned(x: Tensor, above: int, left: int) -> Tensor:
    return F.pad(x, (left, 0, above, 0)) if above or left else x


# The dims that torch reduces in one kernel over blocks of whole rows, columns or all.
_WHOLE = {(1, -1): (1,), (-1, 1): (0,), (-1, -1): (0, 1)}


def _grid_of_shard(x: Tensor, layout: Layout, form: Form, rank: int, out: Tensor | None = None) -> Tensor:
    """amax of the blocks that the shard lies in, as far as it lies in them; a NaN may have any bits."""
    dims = _WHOLE.get(form.block)
    if dims is None:
        grid = ops.amax(_aligned(x, *_lead(layout, form, rank)), list(form.block))
        return grid if out is None else out.copy_(grid)
    if out is not None and x.dtype == out.dtype:
        return torch.linalg.vector_norm(x, torch.inf, dims, keepdim=True, out=out)
    grid = torch.linalg.vector_norm(x, torch.inf, dims, keepdim=True).float()
    return grid if out is None else out.copy_(grid)


def one_nan(amax: Tensor) -> Tensor:
    """``amax`` with every NaN the positive one: reductions and casts may leave another, negative as an integer."""
    return torch.where(amax.isnan(), torch.nan, amax)


def fill_amax(out: Tensor, x: Tensor, layout: Layout, form: Form, rank: int) -> None:
    """Write what a shard knows of the amaxes that ranks reduce.

    Args:
        out: float32 zeros, ``[len(layout.reduced(form)), K blocks]``.
        x: the shard ``[n, K]``, in any floating dtype. Rounding is monotonic, so the amax of the rounded shard is the
            rounded amax: the cast may follow.
        layout, form, rank: which shard of what.
    """
    first, count = layout.blocks(form, rank)
    if not x.numel():
        return
    if _reduces_all(layout, form):
        _grid_of_shard(x, layout, form, rank, out[first : first + count])
        return
    start, rows = layout.shard(rank)
    above, left = layout.lead(form)
    for index, block in enumerate(layout.reduced(form)):
        if first <= block < first + count:
            begin = max(block * form.block[0] - above - start, 0)
            end = min((block + 1) * form.block[0] - above - start, rows)
            out[index] = ops.amax(_aligned(x[begin:end], 0, left), [-1, form.block[1]])[0]


def fill_amax_of_tensors(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """As :func:`fill_amax` for blocks of whole tensors: ``(out, shard)`` of all of them, in one kernel."""
    pairs = [(out, x) for out, x in pairs if x.numel()]
    if pairs:
        norms = torch._foreach_norm([x for _, x in pairs], torch.inf)
        torch._foreach_copy_([out.view(()) for out, _ in pairs], norms)


def _reduces_all(layout: Layout, form: Form) -> bool:
    return isinstance(layout.reduced(form), range)


def _amax_of_shard(x: Tensor, layout: Layout, form: Form, rank: int, reduced: Tensor) -> Tensor | None:
    """The global amaxes of the blocks the shard lies in, or None where the shard alone decides them."""
    first, count = layout.blocks(form, rank)
    if _reduces_all(layout, form):
        return reduced[first : first + count]
    if not reduced.shape[0]:
        return None
    amax = one_nan(_grid_of_shard(x, layout, form, rank))
    for index, block in enumerate(layout.reduced(form)):
        if first <= block < first + count:
            amax[block - first] = reduced[index]
    return amax


def quantize_shard(x: Tensor, layout: Layout, form: Form, rank: int, reduced: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a shard ``[n, K]``, n > 0, by the reduced amaxes: the bytes that the whole weight would have there.

    Returns:
        ``(qdata, scale)`` of the shard, transposed as the form is.
    """
    amax = _amax_of_shard(x, layout, form, rank, reduced)
    if amax is not None and form.transposed:
        amax = amax.t().contiguous()
    above, left = _lead(layout, form, rank)
    qdata, scale = ops.quantize(_aligned(x, above, left), *form.spec.args, form.transposed, amax)
    return (qdata[left:, above:] if form.transposed else qdata[above:, left:]), scale


def scales(reduced: Tensor, format: str, scale_rounding: str) -> Tensor:
    """fp32 scales of any number of amaxes, flat."""
    column = reduced.reshape(-1, 1)
    # A scale depends on its amax alone, so any block shape gives it.
    spec = QuantSpec(format, ROWWISE, "fp32", scale_rounding)
    return ops.quantize(torch.zeros_like(column), *spec.args, False, column)[1].view(-1)


def scale_of_form(flat: Tensor, layout: Layout, form: Form) -> Tensor:
    """Flat scales of a weight's grid as the form's Quantized holds them."""
    grid = layout.grid(form)
    if form.transposed and 1 not in grid:
        # Flat in between, so that dims of one get the strides of a tensor that was made in this shape.
        flat = flat.view(grid).t().reshape(-1)
    scale = flat.view(grid[::-1] if form.transposed else grid)
    spec = form.spec
    if not BLOCKS[spec.block].rows_contiguous:
        return scale
    above, left = layout.lead(form)
    rows, cols = above + layout.rows, left + layout.cols
    shape = (cols, rows) if form.transposed else (rows, cols)
    return empty_scale(shape, spec.block, spec.scale_format, scale.device).copy_(scale)
