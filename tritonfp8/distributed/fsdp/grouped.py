"""Many shards cast in one launch, on GPUs: the amaxes of a model, the bytes of all that FSDP gathers together.

Shard by shard the same bits cost the host some tens of microseconds each, more than the casts take the GPU. They are
still cast so (:mod:`.shard_casts`) where no GPU computes, in orientations whose scales travel in the segments
(mxfp8), and where a block begins inside a tile of the kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tritonfp8.distributed.fsdp.byte_layout import WeightOrientation
from tritonfp8.distributed.fsdp.gather_plan import Batch, Group, Reduction
from tritonfp8.distributed.fsdp.shard_casts import fill_amax, fill_amax_of_tensors
from tritonfp8.launch import Shard, ShardTable
from tritonfp8.launch import shards as launch_shards
from tritonfp8.specs import TENSORWISE


def runs_kernels(x: Tensor) -> bool:
    """Whether kernels cast a shard."""
    return x.is_cuda and x.is_contiguous()


def _table(
    batch: Batch, purpose: object, data: dict[str, Tensor], describe: Callable[[str, Tensor], Shard]
) -> ShardTable:
    """Made once for shards that stay where they are."""
    addresses = tuple([shard.data_ptr() for shard in data.values()])
    reduction = batch.tables.get(purpose)
    if reduction is None or reduction[0] != addresses:
        table = launch_shards.shard_table([describe(name, shard) for name, shard in data.items()])
        reduction = batch.tables[purpose] = addresses, table
    return reduction[1]


def _shard_to_read(batch: Batch, name: str, data: Tensor) -> Shard:
    places = zip(batch.plans[name].places, batch.offsets[name], strict=True)
    return Shard(data, tuple(place._replace(first=first) for place, first in places))


def fill_amaxes(batch: Batch, amaxes: Tensor) -> None:
    """Write what the shards of this rank know of the amaxes that ranks reduce.

    Args:
        batch: the weights.
        amaxes: float32 zeros, in the order of the batch.
    """
    grouped: dict[tuple[torch.dtype, tuple[WeightOrientation, ...]], dict[str, Tensor]] = {}
    alone: list[str] = []
    for name, plan in batch.plans.items():
        shard = plan.local()
        if not (plan.is_groupable and runs_kernels(shard)):
            alone.append(name)
        elif shard.numel():
            grouped.setdefault((shard.dtype, plan.layout.orientations), {})[name] = shard
    if alone:
        _fill_one_by_one(batch, alone, amaxes)
    for key, shards in grouped.items():
        table = _table(batch, key, shards, functools.partial(_shard_to_read, batch))
        launch_shards.amax_of_shards(table, [orientation.block for orientation in key[1]], amaxes)


def _fill_one_by_one(batch: Batch, names: Sequence[str], amaxes: Tensor) -> None:
    grids = batch.split(amaxes)
    tensors: list[tuple[Tensor, Tensor]] = []
    for name in names:
        plan = batch.plans[name]
        shard = plan.shard()
        for orientation, grid in zip(plan.layout.orientations, grids[name], strict=True):
            if orientation.block == TENSORWISE:
                tensors.append((grid, shard))
            elif grid.numel():
                fill_amax(grid, shard, plan.layout, orientation, plan.managed.rank)
    fill_amax_of_tensors(tensors)


def segments_to_send(group: Group, reduction: Reduction, wanted: Sequence[int]) -> dict[str, Tensor]:
    """What this rank sends of weights that are gathered together.

    Args:
        group: the weights.
        reduction: of one of them, whose amaxes are those of all.
        wanted: which orientations to send.

    Returns:
        Flat uint8 segments by name; none where the weights cannot be cast together.
    """
    shards = {name: plan.local() for name, plan in group.plans.items()}
    alike = group.is_groupable and len({shard.dtype for shard in shards.values()}) == 1
    if not alike or not all(runs_kernels(shard) for shard in shards.values()):
        return {}
    first = next(iter(group.plans.values()))
    full = all(shards[name].shape[0] == plan.layout.shard_rows for name, plan in group.plans.items())
    empty = torch.empty if full else torch.zeros
    buffer = empty(group.starts[-1], dtype=torch.uint8, device=first.managed.device)
    filled = {name: shard for name, shard in shards.items() if shard.numel()}
    for i in wanted if filled else ():
        orientation = first.layout.orientations[i]
        table = _table(
            reduction.batch, (group.key, i), filled, functools.partial(_shard_to_send, reduction.batch, group, i)
        )
        launch_shards.quantize_shards(
            table,
            orientation.spec,
            orientation.block,
            orientation.transposed,
            first.quantized_dtype,
            reduction.amaxes,
            buffer,
        )
    found = zip(group.plans.items(), group.starts, strict=False)
    return {name: buffer[start : start + plan.layout.rank_segment_size] for (name, plan), start in found}


def _shard_to_send(batch: Batch, group: Group, i: int, name: str, data: Tensor) -> Shard:
    plan = group.plans[name]
    start = group.starts[list(group.plans).index(name)]
    (offset, shape), _ = plan.layout.regions(plan.layout.orientations[i])
    place = plan.places[i]._replace(first=batch.offsets[name][i])
    return Shard(data, (place,), start + offset, shape[1])
