"""Casts of many shards of weights, shard by shard; see the rows of the ops for what an entry of ``places`` holds.

And the parts of a gradient that ranks exchange: cast to codes, and added.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tritonfp8.reference import casts, optimizer
from tritonfp8.specs import spec_of, transposed
from tritonfp8.specs.formats import FORMATS

PART = optimizer.MOMENT
"""How parts of gradients are quantized. Their scales are sent as exponents, one byte each."""
PART_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of gradients that are quantized or added."""
_COLS = PART.block[1]
_ALIGNMENT = 16


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


def part_sizes(n: int) -> tuple[int, int]:
    """The scales of a quantized part of ``n`` elements, and its bytes: codes of whole groups, exponents, zeros."""
    groups = -(-n // _COLS)
    return groups, groups * _COLS + -(-groups // _ALIGNMENT) * _ALIGNMENT


def check_parts(x: Tensor, parts: int) -> None:
    """Raise unless ``x`` divides into ``parts`` alike.

    Raises:
        TypeError: a dtype that is not in :data:`PART_DTYPES`.
        ValueError: not a vector of so many equal parts.
    """
    if x.dtype not in PART_DTYPES:
        raise TypeError(f"gradients are quantized from {', '.join(map(str, PART_DTYPES))}; got {x.dtype}")
    if x.ndim != 1 or parts < 1 or x.numel() % parts:
        raise ValueError(f"a gradient must be a vector of {parts} parts of one size; got the shape {tuple(x.shape)}")


def quantize_parts(x: Tensor, parts: int, rank: int) -> Tensor:
    """Quantize the parts of a gradient to e4m3 with a scale for 128 elements, rounded at random without bias.

    The random words of a group of 128 are a hash of the sum of its bits, of ``rank`` and of the index of the group. So
    equal gradients have equal codes, in a resumed run too, and ranks with equal gradients round apart. An element that
    is not finite makes its group NaN.

    Args:
        x: ``[parts * n]``, contiguous, float32, bfloat16 or float16.
        parts: one for each rank.
        rank: of the gradient.

    Returns:
        uint8 ``[parts, bytes]``: codes, then exponents of scales, then zeros; see :func:`part_sizes`.

    Raises:
        TypeError, ValueError: as :func:`check_parts`.
    """
    check_parts(x, parts)
    n = x.numel() // parts
    groups, size = part_sizes(n)
    values = F.pad(x.view(parts, n).float(), (0, groups * _COLS - n)).view(parts * groups, _COLS)
    own = values.view(torch.int32).long().sum(1) & optimizer.WORD
    index = torch.arange(parts * groups, device=x.device)
    place = optimizer.hash32(optimizer.hash32(torch.full_like(index, rank)) ^ index)
    at = torch.arange(_COLS, device=x.device)
    rows, second = optimizer.hash32(own ^ place)[:, None], place[:, None]
    bits = optimizer.bits_of(optimizer.states_of(rows, at // optimizer.RANDOM_GROUP, second), at, 0)
    enc, scale = casts.encode(casts.amax(values, PART.block), PART)
    fmt = FORMATS[PART.format]
    codes = casts.codes_of(optimizer.round_to_code(values * enc, fmt, bits), fmt)
    exponents = (scale.view(torch.int32) >> 23).to(torch.uint8).view(parts, groups)
    found = torch.cat([codes.view(parts, groups * _COLS), exponents], 1)
    return F.pad(found, (0, size - found.shape[1]))


def sum_in_pairs(out: Tensor, parts: Tensor, factor: float) -> None:
    """Add parts of gradients: neighbours, then neighbouring sums, and so on; an odd last one waits.

    The order depends on the number of parts only, so it is the order of the units of a balanced tree, whether one rank
    adds them or several.

    Args:
        out: ``[n]``, contiguous, written to: the sum in float32 times ``factor``, rounded to its dtype.
        parts: ``[P, n]``, contiguous, of :data:`PART_DTYPES`; or uint8 of :func:`quantize_parts`.
        factor: rounded to float32.

    Raises:
        TypeError: parts of another dtype.
        ValueError: parts of another size.
    """
    check_sum(out, parts)
    n = out.numel()
    values = parts if parts.dtype != torch.uint8 else _dequantize_parts(parts, part_sizes(n)[0])
    sums = list(values[:, :n].float().unbind())
    while len(sums) > 1:
        last = sums[len(sums) - len(sums) % 2 :]
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=False)] + last
    out.copy_(sums[0] * factor)


def check_sum(out: Tensor, parts: Tensor) -> None:
    """Raise as :func:`sum_in_pairs`."""
    if parts.dtype not in (*PART_DTYPES, torch.uint8):
        raise TypeError(f"gradients are added in {', '.join(map(str, PART_DTYPES))}, or as codes; got {parts.dtype}")
    size = part_sizes(out.numel())[1] if parts.dtype == torch.uint8 else out.numel()
    if parts.ndim != 2 or not parts.shape[0] or parts.shape[1] != size:
        raise ValueError(
            f"the parts of a sum of {out.numel()} elements must be [parts, {size}]; got {tuple(parts.shape)}"
        )


def _dequantize_parts(parts: Tensor, groups: int) -> Tensor:
    codes = parts[:, : groups * _COLS].view(FORMATS[PART.format].dtype)
    exponents = parts[:, groups * _COLS :][:, :groups]
    return optimizer.read_moment(codes, exponents, False)
