"""Quantize shards by the scales of the global tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.distributed.collectives import all_reduce
from tritonfp8.distributed.shard_layout import DimLayout, is_split, local_blocks, split_blocks
from tritonfp8.layers.linear import NO_PAIR, Amaxes, Pair, Specs, found_together, quantize_for, quantize_now
from tritonfp8.specs import QuantSpec, transposed


class Grid(NamedTuple):
    """The amax of each block of a matrix, as int32. Rows and columns refer to the untransposed matrix.

    Attributes:
        bits: the amaxes as int32 ``[blocks along the rows, blocks along the columns]``.
        blocks: the sizes of a block.
        layouts: of the rows and the columns.
        held: the indices of the global blocks that the rows and columns of ``bits`` are; None for the blocks of the
            aligned matrix.
    """

    bits: Tensor
    blocks: tuple[int, int]
    layouts: tuple[DimLayout, DimLayout]
    held: tuple[Sequence[int], Sequence[int]] | None = None

    def slots(self, dim: int) -> dict[int, int]:
        """The index along ``dim`` of each global block."""
        held = local_blocks(self.layouts[dim], self.blocks[dim]) if self.held is None else self.held[dim]
        return {block: slot for slot, block in enumerate(held)}

    def split_dims(self) -> list[int]:
        """The dims along which some block lies on more than one rank."""
        return [dim for dim in (0, 1) if is_split(self.layouts[dim], self.blocks[dim])]


def _picked(grid: Grid, dim: int) -> Tensor:
    """The amaxes of the blocks along ``dim`` that lie on more than one rank; zeros for blocks that are not here."""
    block = grid.blocks[dim]
    if block == -1:
        return grid.bits
    here = grid.slots(dim)
    absent = grid.bits.new_zeros(grid.bits.shape[1 - dim])
    blocks = split_blocks(grid.layouts[dim], block)
    return torch.stack([grid.bits.select(dim, here[b]) if b in here else absent for b in blocks])


def _put_back(grid: Grid, dim: int, reduced: Tensor) -> Grid:
    block = grid.blocks[dim]
    if block == -1:
        return grid._replace(bits=reduced.reshape(grid.bits.shape))
    here = grid.slots(dim)
    bits = grid.bits.clone()
    for i, b in enumerate(split_blocks(grid.layouts[dim], block)):
        if b in here:
            bits.select(dim, here[b]).copy_(reduced[i])
    return grid._replace(bits=bits)


def _reduce_dims(grids: list[Grid], dims: dict[int, int], groups: tuple[str, ...]) -> None:
    """Reduce the grids of these indices, each along one dim, by one MAX over each group."""
    picked = [_picked(grids[i], dim) for i, dim in dims.items()]
    buffer = torch.cat([p.flatten() for p in picked])
    for group in groups:
        # As integers, non-negative floats keep their order, and NaN is the largest. A MAX of floats may drop a NaN.
        buffer = all_reduce(buffer, "max", group)
    parts = buffer.split([p.numel() for p in picked])
    for (i, dim), p, part in zip(dims.items(), picked, parts, strict=True):
        grids[i] = _put_back(grids[i], dim, part.view(p.shape))


def reduce_grids(grids: Sequence[Grid]) -> list[Grid]:
    """Reduce each amax over all ranks that share its block: one collective over each group, for all grids together."""
    found = list(grids)
    for turn in (0, 1):
        by_groups: dict[tuple[str, ...], dict[int, int]] = {}
        for i, grid in enumerate(found):
            for dim in grid.split_dims()[turn : turn + 1]:
                by_groups.setdefault(grid.layouts[dim].groups, {})[i] = dim
        for groups, dims in by_groups.items():
            _reduce_dims(found, dims, groups)
    return found


def global_amax(
    x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None, layouts: tuple[DimLayout, DimLayout]
) -> Amaxes:
    """The amaxes of the global blocks that a shard ``x`` and its transpose are quantized by.

    Args:
        x: this rank's part ``[rows, cols]``, aligned as ``layouts`` says.
        spec, spec_t: of ``x`` and of ``x.T``, or None.
        layouts: of the rows and the columns.

    Returns:
        float32: for ``x`` and for ``x.T``, the amaxes of the global blocks that are at least partly here. None where
        each block lies on one rank, or the spec is None.
    """
    if spec is not None and spec == spec_t and spec.block == transposed(spec.block):
        amax, _ = global_amax(x, spec, None, layouts)
        return amax, None if amax is None else amax.t().contiguous()
    grids, of = [], []
    for i, (s, transpose) in enumerate(((spec, False), (spec_t, True))):
        if s is None:
            continue
        blocks = (s.block[1], s.block[0]) if transpose else (s.block[0], s.block[1])
        if is_split(layouts[0], blocks[0]) or is_split(layouts[1], blocks[1]):
            amax = ops.amax(x.t(), list(s.block)).t() if transpose else ops.amax(x, list(s.block))
            grids.append(Grid(amax.contiguous().view(torch.int32), blocks, layouts))
            of.append(i)
    found: list[Tensor | None] = [None, None]
    for i, grid in zip(of, reduce_grids(grids), strict=True):
        amax = grid.bits.view(torch.float32)
        found[i] = amax.t().contiguous() if i else amax
    return found[0], found[1]


def quantize_by_amaxes(
    x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None, amaxes: Amaxes
) -> tuple[Pair, Pair]:
    """``(qdata, scale)`` of a shard ``x [rows, cols]`` and of ``x.T``, by the amaxes of the global matrix."""
    amax, amax_t = amaxes
    if amax is None and amax_t is None:
        return quantize_for(x, spec, spec_t)
    return (
        NO_PAIR if spec is None else ops.quantize(x, *spec.args, False, amax),
        NO_PAIR if spec_t is None else ops.quantize(x, *spec_t.args, True, amax_t),
    )


def quantize_shard(x: Tensor, specs: Specs, layouts: tuple[DimLayout, DimLayout]) -> tuple[Pair, Pair]:
    """``(qdata, scale)`` of a shard and of its transpose by the scales of the global matrix.

    Args:
        x: this rank's part ``[rows, cols]``, aligned as ``layouts`` says.
        specs: of ``x`` and of ``x.T``.
        layouts: of the rows and the columns.
    """
    spec, spec_t, codes = specs
    if codes is None or spec_t is None:
        return quantize_by_amaxes(x, spec, spec_t, global_amax(x, spec, spec_t, layouts))
    if not _spans_ranks(codes, False, layouts) and not _spans_ranks(spec_t, True, layouts):
        return quantize_for(x, spec, spec_t, codes)
    pair, amax_t = quantize_codes(x, codes, spec_t, layouts)
    return NO_PAIR if spec is None else pair, ops.transpose_codes(*pair, *codes.args, *spec_t.args, amax_t)


def _spans_ranks(spec: QuantSpec, transpose: bool, layouts: tuple[DimLayout, DimLayout]) -> bool:
    """Whether some block of a matrix, or of its transpose, lies on more than one rank."""
    return any(is_split(layouts[i], spec.block[i ^ transpose]) for i in (0, 1))


def quantize_codes(
    x: Tensor, spec: QuantSpec, spec_t: QuantSpec, layouts: tuple[DimLayout, DimLayout]
) -> tuple[Pair, Tensor | None]:
    """``(qdata, scale)`` of a shard, and the amaxes by which its transpose is made from these codes.

    The amaxes are float32, of the global blocks; None where each block lies on one rank, unless the cast finds them.
    """
    if not _spans_ranks(spec, False, layouts) and found_together(spec, spec_t):
        pair, amax_t = quantize_now(x, spec, spec_t, spec)
        if amax_t is None or not _spans_ranks(spec_t, True, layouts):
            return pair, amax_t
        bits = amax_t.t().contiguous().view(torch.int32)
        (grid,) = reduce_grids([Grid(bits, (spec_t.block[1], spec_t.block[0]), layouts)])
        return pair, grid.bits.view(torch.float32).t().contiguous()
    pair, _ = quantize_by_amaxes(x, spec, None, global_amax(x, spec, None, layouts))
    return pair, amax_of_codes(pair, spec, spec_t, layouts)


def amax_of_codes(
    pair: Pair, spec: QuantSpec, spec_t: QuantSpec, layouts: tuple[DimLayout, DimLayout]
) -> Tensor | None:
    """:func:`global_amax` of the transpose of a shard's codes ``pair``, which lie as ``layouts`` says."""
    if not _spans_ranks(spec_t, True, layouts):
        return None
    return global_amax(ops.dequantize(*pair, *spec.args, torch.float32), None, spec_t, layouts)[1]
