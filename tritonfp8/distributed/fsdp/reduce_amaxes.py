"""The scales of whole weights, from amaxes that ranks reduce: one small collective for all weights of a model."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tritonfp8.distributed.fsdp.gather_plan import Batch, GatherPlan, Reduction, scale_kind
from tritonfp8.distributed.fsdp.grouped import fill_amaxes
from tritonfp8.distributed.fsdp.shard_casts import one_nan, scale_of_orientation, scales_of_amaxes
from tritonfp8.distributed.global_scales import Grid, reduce_grids


def batches_of(plans: dict[str, GatherPlan]) -> list[Batch]:
    """The weights by the process group over which they are sharded."""
    by_group: dict[dist.ProcessGroup, dict[str, GatherPlan]] = {}
    for name, plan in plans.items():
        by_group.setdefault(plan.managed.process_group, {})[name] = plan
    return [Batch(members) for members in by_group.values()]


@torch.no_grad()
def reduce_amaxes(batch: Batch) -> dict[str, Reduction]:
    """Find the scales of these weights, by one collective (two with tensor parallelism).

    Returns:
        The result for each weight, by its name.
    """
    first = next(iter(batch.plans.values()))
    amaxes = torch.zeros(sum(batch.sizes), device=first.managed.device)
    fill_amaxes(batch, amaxes)
    if amaxes.numel():
        # The bits of non-negative floats are ordered as integers, with NaN on top. A MAX of floats may drop a NaN.
        amaxes = one_nan(amaxes)
        dist.all_reduce(amaxes.view(torch.int32), dist.ReduceOp.MAX, group=first.managed.process_group)
    if batch.shares:
        _reduce_over_tensor_parallel(batch, amaxes)
    rounded = {dtype: one_nan(amaxes.to(dtype).float()) for dtype in batch.dtypes}
    reduced = {dtype: batch.split(values) for dtype, values in rounded.items()}
    scales = {
        (dtype, kind): batch.split(scales_of_amaxes(values, *kind))
        for dtype, values in rounded.items() for kind in batch.kinds
    }  # fmt: skip
    found: dict[str, Reduction] = {}
    for name, plan in batch.plans.items():
        dtype = plan.quantized_dtype
        own = tuple(
            None if orientation.sends_scales
            else scale_of_orientation(scales[dtype, scale_kind(orientation)][name][i], plan.layout, orientation)
            for i, orientation in enumerate(plan.layout.orientations)
        )  # fmt: skip
        found[name] = Reduction(batch, plan.stamp, rounded[dtype], tuple(reduced[dtype][name]), own)
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
