"""Many shards cast in one launch, on GPUs: the amaxes of a model, the bytes of all weights that FSDP gathers together.

Cast one by one the shards get the same bits, but the host needs some tens of microseconds for each cast, more than the
GPU. Shards are cast one by one (:mod:`.shard_casts`) on a CPU, if scales travel with the bytes (mxfp8), if a recipe
rounds weights before, and if a block begins inside a tile of the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.distributed.fsdp.gather_plan import Batch, GatherGroup, Reduction
from tritonfp8.distributed.fsdp.orientations import WeightOrientation
from tritonfp8.distributed.fsdp.shard_casts import (
    fill_amax,
    fill_amax_of_tensors,
    one_nan,
    scale_of_orientation,
    scales_of_amaxes,
)
from tritonfp8.distributed.global_scales import Grid, reduce_grids
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
    others: dict[str, Tensor] = {}
    for name, plan in batch.plans.items():
        shard = plan.managed.local
        if not (plan.is_groupable and runs_kernels(shard)):
            others[name] = shard
        elif shard.numel():
            grouped.setdefault((shard.dtype, plan.layout.orientations), {})[name] = shard
    if others:
        fill_one_by_one(batch, others, amaxes)
    for key, shards in grouped.items():
        indices = range(len(key[1]))

        def make(names: list[str], indices: range = indices) -> Tensor:
            return ops.places_to_read([[_grid_place(batch, name, i) for i in indices] for name in names])

        blocks = [size for orientation in key[1] for size in orientation.block]
        ops.amax_of_shards(amaxes, list(shards.values()), _places(batch, key, shards, make), blocks)


def fill_one_by_one(batch: Batch, shards: dict[str, Tensor], amaxes: Tensor) -> None:
    """As :func:`fill_amaxes` for some weights, by their names."""
    grids = batch.split(amaxes)
    tensors: list[tuple[Tensor, Tensor]] = []
    for name, local in shards.items():
        plan = batch.plans[name]
        shard = local.detach().to(plan.device) if plan.weights is None else plan.shard(local)
        for place, grid in zip(plan.layout.places(plan.rank), grids[name], strict=True):
            if place.orientation.block == TENSORWISE:
                tensors.append((grid, shard))
            elif grid.numel():
                fill_amax(grid, shard, place)
    if tensors:
        fill_amax_of_tensors(tensors)


@torch.no_grad()
def reduce_amaxes(batch: Batch) -> dict[str, Reduction]:
    """Find the scales of these weights, by one collective (two with tensor parallelism).

    Returns:
        The result for each weight, by its name.
    """
    first = next(iter(batch.plans.values())).managed
    amaxes = torch.zeros(sum(batch.sizes), device=first.device)
    fill_amaxes(batch, amaxes)
    if amaxes.numel():
        # The bits of non-negative floats are ordered as integers, with NaN on top. A MAX of floats may drop a NaN.
        amaxes = one_nan(amaxes)
        dist.all_reduce(amaxes.view(torch.int32), dist.ReduceOp.MAX, group=first.process_group)
    if batch.shares:
        _reduce_over_tensor_parallel(batch, amaxes)
    rounded = {dtype: one_nan(amaxes.to(dtype).float()) for dtype in batch.dtypes}
    reduced = {dtype: batch.split(values) for dtype, values in rounded.items()}
    scales = {
        (dtype, *kind): batch.split(scales_of_amaxes(values, *kind))
        for dtype, values in rounded.items() for kind in batch.kinds
    }  # fmt: skip
    found: dict[str, Reduction] = {}
    for name, plan in batch.plans.items():
        dtype = plan.quantized_dtype
        own = tuple(
            None if how is None
            else scale_of_orientation(scales[dtype, how[0].spec.format, how[0].spec.scale_rounding][name][i], *how)
            for i, how in enumerate(plan.scales)
        )  # fmt: skip
        found[name] = Reduction(batch, plan.managed.stamp, rounded[dtype], tuple(reduced[dtype][name]), own)
    return found


def _reduce_over_tensor_parallel(batch: Batch, amaxes: Tensor) -> None:
    """Reduce again over the ranks of tensor parallelism, where they share a block of a weight."""
    bits = batch.split(amaxes.view(torch.int32))
    grids, places = [], []
    for name, plan in batch.plans.items():
        layout = plan.layout
        for i in plan.split:
            orientation = layout.orientations[i]
            assert layout.within is not None
            first_row, first_col = (layout.start(dim) // orientation.block[dim] for dim in (0, 1))
            held = (
                [first_row + row for row in layout.reduced(orientation)],
                [first_col + col for col in range(plan.grids[i][1])],
            )
            grids.append(Grid(bits[name][i], orientation.block, layout.within, held))
            places.append(bits[name][i])
    for place, grid in zip(places, reduce_grids(grids), strict=True):
        place.copy_(grid.bits)


def segments_to_send(group: GatherGroup, reduction: Reduction, wanted: Sequence[int]) -> dict[str, Tensor]:
    """The rank segments of weights that are gathered together.

    Args:
        group: the weights.
        reduction: of one of them, whose amaxes hold for all.
        wanted: indices of the orientations to send.

    Returns:
        Flat uint8 segments by name; empty if the weights cannot be cast together.
    """
    if not group.is_groupable:
        return {}
    shards: dict[str, Tensor] = {}
    for name, plan in group.plans.items():
        shards[name] = shard = plan.managed.local
        if not runs_kernels(shard):
            return {}
    if len({shard.dtype for shard in shards.values()}) > 1:
        return {}
    first = next(iter(group.plans.values()))
    full = all(shards[name].shape[0] == plan.layout.shard_rows for name, plan in group.plans.items())
    empty = torch.empty if full else torch.zeros
    buffer = empty(group.starts[-1], dtype=torch.uint8, device=first.device)
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
        data, _ = group.plans[name].layout.regions[i]
        places.append((starts[name] + data.offset, data.shape[1], _grid_place(batch, name, i)))
    return ops.places_to_write(places)
