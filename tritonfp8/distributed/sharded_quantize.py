"""Quantize shards by the scales of the global tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.distributed.collectives import all_reduce
from tritonfp8.distributed.layout import DimLayout, is_split, local_blocks, split_blocks
from tritonfp8.linear import Quantizer
from tritonfp8.specs import QuantSpec

Pair = tuple[Tensor | None, Tensor | None]
NO_PAIR: Pair = (None, None)


class _Grid(NamedTuple):
    """The amax of each block of one orientation, as int32; rows and columns are those of the matrix itself."""

    bits: Tensor
    blocks: tuple[int, int]


def _picked(grid: _Grid, dim: int, layout: DimLayout) -> Tensor:
    """The entries of ``grid`` for the blocks along ``dim`` that lie on more than one rank, zero where not here."""
    block = grid.blocks[dim]
    if block == -1:
        return grid.bits
    here = {b: slot for slot, b in enumerate(local_blocks(layout, block))}
    absent = grid.bits.new_zeros(grid.bits.shape[1 - dim])
    rows = [grid.bits.select(dim, here[b]) if b in here else absent for b in split_blocks(layout, block)]
    return torch.stack(rows)


def _put_back(grid: _Grid, dim: int, layout: DimLayout, reduced: Tensor) -> _Grid:
    block = grid.blocks[dim]
    if block == -1:
        return grid._replace(bits=reduced.reshape(grid.bits.shape))
    here = {b: slot for slot, b in enumerate(local_blocks(layout, block))}
    bits = grid.bits.clone()
    for i, b in enumerate(split_blocks(layout, block)):
        if b in here:
            bits.select(dim, here[b]).copy_(reduced[i])
    return grid._replace(bits=bits)


def _reduce(grids: list[_Grid], layouts: tuple[DimLayout, DimLayout]) -> list[_Grid]:
    """Make each amax that of the whole block: along each dim, one MAX over each group, for all grids together."""
    for dim, layout in enumerate(layouts):
        split = [i for i, grid in enumerate(grids) if is_split(layout, grid.blocks[dim])]
        if not split:
            continue
        picked = [_picked(grids[i], dim, layout) for i in split]
        buffer = torch.cat([p.flatten() for p in picked])
        for group in layout.groups:
            # As integers, non-negative floats keep their order and NaN is the largest: a float MAX may drop it.
            buffer = all_reduce(buffer, "max", group)
        start = 0
        for i, p in zip(split, picked, strict=True):
            grids[i] = _put_back(grids[i], dim, layout, buffer.narrow(0, start, p.numel()).view(p.shape))
            start += p.numel()
    return grids


def global_amax(
    x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None, layouts: tuple[DimLayout, DimLayout]
) -> tuple[Tensor | None, Tensor | None]:
    """The ``amax`` with which to quantize a shard ``x`` and its transpose.

    Args:
        x: this rank's part ``[rows, cols]``, aligned as ``layouts`` says.
        spec, spec_t: of ``x`` and of ``x.T``, or None.
        layouts: of the rows and the columns.

    Returns:
        float32, the amax over the blocks of the global matrix, those that are (partly) here; None where each block is
        whole on one rank, or the spec is None.
    """
    grids, of = [], []
    for i, (s, transpose) in enumerate(((spec, False), (spec_t, True))):
        if s is None:
            continue
        blocks = (s.block[1], s.block[0]) if transpose else (s.block[0], s.block[1])
        if is_split(layouts[0], blocks[0]) or is_split(layouts[1], blocks[1]):
            amax = ops.amax(x.t(), list(s.block)).t() if transpose else ops.amax(x, list(s.block))
            grids.append(_Grid(amax.contiguous().view(torch.int32), blocks))
            of.append(i)
    found: list[Tensor | None] = [None, None]
    for i, grid in zip(of, _reduce(grids, layouts), strict=True):
        amax = grid.bits.view(torch.float32)
        found[i] = amax.t().contiguous() if i else amax
    return found[0], found[1]


def quantize_shard(
    x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None, layouts: tuple[DimLayout, DimLayout]
) -> tuple[Pair, Pair]:
    """``(qdata, scale)`` of a shard ``x [rows, cols]`` and of ``x.T``, by the scales of the global matrix."""
    amax, amax_t = global_amax(x, spec, spec_t, layouts)
    if amax is None and amax_t is None:
        return Quantizer()("", x, spec, spec_t)
    return (
        NO_PAIR if spec is None else ops.quantize(x, *spec.args, False, amax),
        NO_PAIR if spec_t is None else ops.quantize(x, *spec_t.args, True, amax_t),
    )


@dataclass(frozen=True)
class ShardedQuantizer(Quantizer):
    """Quantizes the operands of a layer whose dims lie as these layouts say: M tokens, N out and K in features."""

    m: DimLayout
    n: DimLayout
    k: DimLayout

    def __call__(self, operand: str, x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> tuple[Pair, Pair]:
        """See :class:`~tritonfp8.linear.Quantizer`; ``x`` is this rank's part."""
        layouts = {"input": (self.m, self.k), "weight": (self.n, self.k), "grad_output": (self.m, self.n)}[operand]
        return quantize_shard(x, spec, spec_t, layouts)
