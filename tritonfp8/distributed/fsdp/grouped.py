"""Many shards cast in one launch, on GPUs: the amaxes of a model, the bytes of all weights that FSDP gathers together.

Cast one by one the shards get the same bits, but the host needs some tens of microseconds for each cast, more than the
GPU. Shards are cast one by one (:mod:`.shard_casts`) on a CPU, if scales travel with the bytes (mxfp8), and if a block
begins inside a tile of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.distributed.fsdp.byte_layout import WeightOrientation
from tritonfp8.distributed.fsdp.gather_plan import Batch, GatherGroup, Reduction
from tritonfp8.distributed.fsdp.shard_casts import fill_amax, fill_amax_of_tensors
from tritonfp8.ops import GridPlace
from tritonfp8.specs import TENSORWISE


def runs_kernels(x: Tensor) -> bool:
    """Whether kernels can read a shard."""
    return x.is_cuda and x.is_contiguous()


def _places(batch: Batch, purpose: object, names: Iterable[str], make: Callable[[list[str]], Tensor]) -> Tensor:
    """The places of these weights' shards, made once for each purpose."""
    listed = list(names)
    cached = batch.places.get(purpose)
    if cached is None or cached[0] != listed:
        cached = batch.places[purpose] = listed, make(listed)
    return cached[1]


def _grid_place(batch: Batch, name: str, index: int) -> GridPlace:
    """Where the shard of a weight begins in the grid of one orientation."""
    return batch.plans[name].places[index]._replace(first=batch.offsets[name][index])


def fill_amaxes(batch: Batch, amaxes: Tensor) -> None:
    """Write the amaxes of this rank's shards, which ranks reduce next.

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
        indices = range(len(key[1]))

        def make(names: list[str], indices: range = indices) -> Tensor:
            return ops.places_to_read([[_grid_place(batch, name, i) for i in indices] for name in names])

        blocks = [size for orientation in key[1] for size in orientation.block]
        ops.amax_of_shards(amaxes, list(shards.values()), _places(batch, key, shards, make), blocks)


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


def segments_to_send(group: GatherGroup, reduction: Reduction, wanted: Sequence[int]) -> dict[str, Tensor]:
    """The rank segments of weights that are gathered together.

    Args:
        group: the weights.
        reduction: of one of them, whose amaxes are those of all.
        wanted: indices of the orientations to send.

    Returns:
        Flat uint8 segments by name; empty if the weights cannot be cast together.
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

        def make(names: list[str], i: int = i) -> Tensor:
            return _places_in_buffer(reduction.batch, group, i, names)

        ops.quantize_shards(
            buffer, list(filled.values()), _places(reduction.batch, (group.key, i), filled, make), reduction.amaxes,
            *orientation.spec.args, orientation.transposed, first.quantized_dtype,
        )  # fmt: skip
    found = zip(group.plans.items(), group.starts, strict=False)
    return {name: buffer[start : start + plan.layout.rank_segment_size] for (name, plan), start in found}


def _places_in_buffer(batch: Batch, group: GatherGroup, i: int, names: Sequence[str]) -> Tensor:
    starts = dict(zip(group.plans, group.starts, strict=False))
    places = []
    for name in names:
        layout = group.plans[name].layout
        (offset, shape), _ = layout.regions(layout.orientations[i])
        places.append((starts[name] + offset, shape[1], _grid_place(batch, name, i)))
    return ops.places_to_write(places)
