"""Launch the casts of many shards at once: see :mod:`tritonfp8.kernels.cast.shards`.

What they compute is what :mod:`tritonfp8.distributed.fsdp.shard_casts` computes shard by shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonfp8 import hardware
from tritonfp8.formats import FORMATS, SCALE_FORMATS
from tritonfp8.kernels.cast import shards as kernels
from tritonfp8.launch.kernel_cache import ALIGNMENT, run
from tritonfp8.specs import BLOCK_128X128, ROWWISE, TENSORWISE, QuantSpec
from tritonfp8.tuning import VECTOR_BYTES, CastTile

TILE = CastTile(128, 128, 8)
SUPPORTED_BLOCKS = (ROWWISE, ROWWISE[::-1], TENSORWISE, BLOCK_128X128)


class GridPlace(NamedTuple):
    """Where a shard lies among the amaxes of a form: those of a grid of blocks.

    Attributes:
        first: of the grid's amaxes, among all.
        grid_cols: amaxes in a row of the grid.
        row, col: of the element in which the shard begins, in a matrix whose blocks the grid has.
    """

    first: int
    grid_cols: int
    row: int
    col: int

    def fits(self, block: tuple[int, int]) -> bool:
        """Whether the kernels serve such a block: of one row or column, or one that begins where a tile does."""
        return block in SUPPORTED_BLOCKS and (
            min(block) <= 1 or (self.row % block[0] == 0 and self.col % block[1] == 0)
        )


class Shard(NamedTuple):
    """One shard of a cast.

    Attributes:
        data: ``[n, k]``, contiguous.
        places: in the grid of each orientation, one or two.
        out: where its first byte goes in what is written.
        out_stride: distance of two rows there.
    """

    data: Tensor
    places: tuple[GridPlace, ...]
    out: int = 0
    out_stride: int = 0


class ShardTable(NamedTuple):
    """Shards as a kernel finds them. It holds their addresses, and is of no use once they lie elsewhere.

    Attributes:
        fields: int64 ``[shards, FIELDS]``.
        owners: int32 ``[tiles]``, the shard of each tile.
        like: one of the shards, for their dtype.
        aligned: whether every row of every shard, read and written, begins at a multiple of 16.
    """

    fields: Tensor
    owners: Tensor
    like: Tensor
    aligned: bool


def serves(spec: QuantSpec) -> bool:
    """Whether the kernels cast by this spec."""
    return spec.block in SUPPORTED_BLOCKS and not SCALE_FORMATS[spec.scale_format].exponent_only


def shard_table(shards: Sequence[Shard]) -> ShardTable:
    """The table of shards of one dtype on one device, none of them empty."""
    rows: list[list[int]] = []
    owners: list[int] = []
    aligned = True
    for index, shard in enumerate(shards):
        n, k = shard.data.shape
        place_fields = [value for place in (*shard.places, *shard.places)[:2] for value in place]
        rows.append([shard.data.data_ptr(), n, k, 0, len(owners), shard.out, shard.out_stride, 0, *place_fields])
        owners += [index] * TILE.programs(n, k)
        aligned &= not any(value % ALIGNMENT for value in (shard.data.data_ptr(), n, k, shard.out, shard.out_stride))
    device = shards[0].data.device
    fields = torch.tensor(rows, dtype=torch.int64).to(device)
    return ShardTable(fields, torch.tensor(owners, dtype=torch.int32).to(device), shards[0].data, aligned)


def amax_of_shards(shards: ShardTable, blocks: Sequence[tuple[int, int]], amax: Tensor) -> None:
    """Raise amaxes to those of the shards.

    Args:
        shards: what to read.
        blocks: of each form, in the coordinates of the shard.
        amax: float32 ``[amaxes]``, zeros where no other shard wrote. NaNs may get any bits.
    """
    constants = {
        "ROWS_0": blocks[0][0], "COLS_0": blocks[0][1], "ROWS_1": blocks[-1][0], "COLS_1": blocks[-1][1],
        "FORMS": len(blocks), "ALIGNED": shards.aligned, "TILE_M": TILE.m, "TILE_N": TILE.n,
    }  # fmt: skip
    pointers = (shards.fields, shards.owners, shards.like, amax.view(torch.int32))
    run(kernels.amax_of_shards_kernel, len(shards.owners), pointers, (), constants, **TILE.options())


def quantize_shards(
    shards: ShardTable, spec: QuantSpec, block: tuple[int, int], transposed: bool, rounded: torch.dtype, amax: Tensor,
    out: Tensor,
) -> None:  # fmt: skip
    """Quantize the shards by given amaxes.

    Args:
        shards: what to read, and where to write. The first form of each says where its amaxes are.
        spec: format and scale rounding.
        block: in the coordinates of the shard.
        transposed: whether the transpose of each shard is written.
        rounded: dtype to which elements are rounded first.
        amax: float32 ``[amaxes]``, with no NaN but one.
        out: uint8, to which the shards are written.
    """
    fmt = FORMATS[spec.format]
    constants = {
        "ROWS": block[0], "COLS": block[1], "QMAX": fmt.qmax, "MANTISSA_BITS": fmt.mantissa_bits,
        "EMIN": fmt.emin, "POW2": spec.scale_rounding == "pow2", "TRANSPOSED": transposed,
        "DIRECT_CAST": hardware.abilities(out.device).has_direct_cast, "ALIGNED": shards.aligned,
        "TILE_M": TILE.m, "TILE_N": TILE.n, "R": TILE.rows_a_thread(VECTOR_BYTES) if transposed else 1,
    }  # fmt: skip
    rounded_like = torch.empty(0, dtype=rounded, device=out.device)
    pointers = (
        shards.fields, shards.owners, shards.like, rounded_like, amax.view(torch.int32), out.view(fmt.dtype)
    )  # fmt: skip
    run(kernels.quantize_shards_kernel, len(shards.owners), pointers, (), constants, **TILE.options())
