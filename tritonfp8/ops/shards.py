"""The arguments of the ops that cast many shards at once: ``amax_of_shards`` and ``quantize_shards``.

Both are called for a few shards or for all of a model's. Their places travel as one int64 tensor on the CPU, which is
made once: the dispatcher would convert lists of integers again at each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonfp8.specs import BLOCK_128X128, ROWWISE, TENSORWISE, QuantSpec
from tritonfp8.specs.formats import SCALE_FORMATS

SUPPORTED_BLOCKS = (ROWWISE, ROWWISE[::-1], TENSORWISE, BLOCK_128X128)
"""Blocks that the kernels take, in the coordinates of the shard."""


class GridPlace(NamedTuple):
    """Where a shard begins in the grid of amaxes of one weight, in one orientation.

    Attributes:
        first: index of the grid's first amax among all amaxes.
        grid_cols: amaxes in a row of the grid.
        row, col: of the element in which the shard begins, in a matrix whose blocks the grid has.
    """

    first: int
    grid_cols: int
    row: int
    col: int

    def fits(self, block: tuple[int, int]) -> bool:
        """Whether the ops cast such a shard: blocks of several rows and columns must begin where the shard does."""
        begins = min(block) <= 1 or (self.row % block[0] == 0 and self.col % block[1] == 0)
        return block in SUPPORTED_BLOCKS and begins


def casts_shards(spec: QuantSpec) -> bool:
    """Whether the ops cast shards by this spec."""
    return spec.block in SUPPORTED_BLOCKS and not SCALE_FORMATS[spec.scale_format].exponent_only


def places_to_read(places: Sequence[Sequence[GridPlace]]) -> Tensor:
    """The ``places`` of ``amax_of_shards``: for each shard, its place in each orientation.

    Returns:
        int64 ``[shards, 4 * orientations]``: the fields of each :class:`GridPlace`.
    """
    return torch.tensor([[field for place in of_shard for field in place] for of_shard in places], device="cpu")


def places_to_write(places: Sequence[tuple[int, int, GridPlace]]) -> Tensor:
    """The ``places`` of ``quantize_shards``: for each shard, ``(offset, stride, grid place)``.

    ``offset`` is the index of its first byte in the buffer, ``stride`` the bytes between two rows there.

    Returns:
        int64 ``[shards, 6]``.
    """
    return torch.tensor([[offset, stride, *place] for offset, stride, place in places], device="cpu")
