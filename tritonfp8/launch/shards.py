"""Launch the casts of many shards at once: see :mod:`tritonfp8.kernels.cast.shards`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from tritonfp8.compat import hardware
from tritonfp8.kernels.cast import shards as kernels
from tritonfp8.launch.kernel_cache import run
from tritonfp8.launch.plan import ALIGNMENT, kernel_constants
from tritonfp8.specs import spec_of, transposed
from tritonfp8.specs.formats import FORMATS
from tritonfp8.tuning import cast_tiles

TILE = cast_tiles.SHARDS
# The constants of a spec that the kernel takes.
CONSTANTS = ("ROWS", "COLS", "QMAX", "MANTISSA_BITS", "EMIN", "POW2")


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


# A table is as old as the tensor of places that it was made for, and serves while the shards stay where they are.
_tables: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _table(shards: Sequence[Tensor], places: Sequence[Sequence[int]]) -> ShardTable:
    like = shards[0]
    rows: list[list[int]] = []
    owners: list[int] = []
    aligned = True
    for index, (shard, (offset, stride, *grids)) in enumerate(zip(shards, places, strict=True)):
        if shard.ndim != 2 or not shard.is_contiguous() or (shard.dtype, shard.device) != (like.dtype, like.device):
            raise ValueError(
                f"shards must be contiguous matrices of one dtype on one device; got {tuple(shard.shape)} with strides "
                f"{shard.stride()}, {shard.dtype} on {shard.device}, beside {like.dtype} on {like.device}"
            )
        n, k = shard.shape
        rows.append([shard.data_ptr(), n, k, 0, len(owners), offset, stride, 0, *(grids * 2)[:8]])
        if shard.numel():
            owners += [index] * TILE.programs(n, k)
        aligned &= not any(value % ALIGNMENT for value in (shard.data_ptr(), n, k, offset, stride))
    fields = torch.tensor(rows, dtype=torch.int64).to(like.device)
    return ShardTable(fields, torch.tensor(owners, dtype=torch.int32).to(like.device), like, aligned)


def _table_of(shards: Sequence[Tensor], places: Tensor, written: bool) -> ShardTable:
    """The table of shards of one dtype on one device, made again only if a shard lies elsewhere.

    Args:
        shards: each ``[n, k]``, contiguous.
        places: int64, a row for each shard: where it is written, the offset of its first byte there and the distance of
            two rows; and the fields of its place in one or two grids.
        written: whether the rows say where shards are written.

    Raises:
        ValueError: shards that are no contiguous matrices of one dtype on one device.
    """
    where = [(shard.data_ptr(), shard.shape, shard.stride()) for shard in shards]
    cached = _tables.get(places)
    if cached is None or cached[0] != where:
        rows = places.tolist()
        cached = _tables[places] = where, _table(shards, rows if written else [[0, 0, *row] for row in rows])
    table: ShardTable = cached[1]
    return table


def amax_of_shards(amaxes: Tensor, shards: Sequence[Tensor], places: Tensor, blocks: Sequence[int]) -> None:
    """See :func:`tritonfp8.reference.amax_of_shards`."""
    table = _table_of(shards, places, written=False) if shards else None
    if table is None or not len(table.owners):
        return
    constants = {
        "ROWS_0": blocks[0], "COLS_0": blocks[1], "ROWS_1": blocks[-2], "COLS_1": blocks[-1],
        "FORMS": len(blocks) // 2, "ALIGNED": table.aligned, **TILE.sizes(),
    }  # fmt: skip
    pointers = (table.fields, table.owners, table.like, amaxes.view(torch.int32))
    run(kernels.amax_of_shards_kernel, len(table.owners), pointers, (), constants, **TILE.options())


def quantize_shards(
    out: Tensor,
    shards: Sequence[Tensor],
    places: Tensor,
    amaxes: Tensor,
    spec: str,
    transpose: bool,
    rounded: torch.dtype,
) -> None:
    """See :func:`tritonfp8.reference.quantize_shards`."""
    table = _table_of(shards, places, written=True) if shards else None
    if table is None or not len(table.owners):
        return
    s = spec_of(spec)
    of_spec = kernel_constants(s, transposed(s.block) if transpose else s.block)
    constants = {
        **{name: of_spec[name] for name in CONSTANTS},
        "TRANSPOSED": transpose,
        "DIRECT_CAST": hardware.abilities(out.device).has_direct_cast,
        "ALIGNED": table.aligned,
        **TILE.stores(transpose),
    }
    rounded_like = torch.empty(0, dtype=rounded, device=out.device)
    codes = out.view(FORMATS[s.format].dtype)
    pointers = (table.fields, table.owners, table.like, rounded_like, amaxes.view(torch.int32), codes)
    run(kernels.quantize_shards_kernel, len(table.owners), pointers, (), constants, **TILE.options())
