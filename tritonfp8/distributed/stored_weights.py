"""Weights that are stored in 8 bits, sharded by FSDP2 and tensor parallelism: made, read and replaced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from tritonfp8.distributed.fsdp import Managed, all_managed, managed_weights
from tritonfp8.distributed.shard_layout import Interval, Mesh, chunk, plain_mesh
from tritonfp8.formats import FORMATS
from tritonfp8.layers.stored import (
    DTYPES,
    StoredRows,
    StoredSharding,
    StoredWeight,
    read_operand,
    register_stored_sharding,
    store,
    stored_part,
)
from tritonfp8.specs import QuantSpec


def _managed(layer: nn.Module) -> Managed | None:
    return managed_weights([layer]).get(layer)


def _interval(size: int, dim: int, placements: Sequence[Placement], mesh: Mesh) -> Interval:
    """The part of a dim that this rank has. FSDP2 shards what tensor parallelism left, by a strided placement."""
    found = Interval(0, size)
    each = list(zip(placements, mesh.sizes, mesh.here, strict=True))
    for placement, parts, index in sorted(each, key=lambda item: type(item[0]) is not Shard):
        if not placement.is_replicate() and placement.dim == dim:  # type: ignore[attr-defined]
            found = chunk(found, parts, index)
    return found


def _distributed(local: Tensor, like: DTensor) -> DTensor:
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


@torch.no_grad()
def shard(layer: nn.Module, stored: StoredWeight, like: Tensor | None = None) -> Tensor:
    """This rank's part of a whole stored weight, as a DTensor that lies as the weight of the layer does.

    Args:
        layer: whose weight it becomes.
        stored: ``[N, K]``, the same on all ranks.
        like: the DTensor whose placements it gets; by default the weight of the layer.
    """
    like = layer._parameters["weight"] if like is None else like
    assert isinstance(like, DTensor)
    mesh = Mesh(*plain_mesh(like.device_mesh))
    rows: Tensor = stored.as_rows()
    for dim in (0, 1):
        start, length = _interval(like.shape[dim], dim, like.placements, mesh)
        rows = rows.narrow(dim, start, length)
    rows = rows.clone()
    assert isinstance(rows, StoredRows)
    managed = _managed(layer)
    rows.total = None if managed is None else managed.size[0]
    return _distributed(rows, like)


@torch.no_grad()
def store_sharded(layer: nn.Module, values: Tensor, spec: QuantSpec) -> Tensor:
    """The stored DTensor of a DTensor of values: gathers this one weight, because scales are those of the whole."""
    assert isinstance(values, DTensor)
    return shard(layer, store(values.full_tensor(), spec), values)


def values_of(weight: Tensor) -> Tensor:
    """The plain DTensor of a stored one; no rank sends anything."""
    assert isinstance(weight, DTensor)
    part = stored_part(weight)
    assert part is not None
    return _distributed(part.dequantize(), weight)


@torch.no_grad()
def whole(weight: Tensor) -> Tensor:
    """The whole of a stored DTensor, on each rank: a stored weight of the same codes.

    If ranks have parts of its rows (``RowwiseParallel``), it is a plain tensor of the values.
    """
    assert isinstance(weight, DTensor)
    part = stored_part(weight)
    assert part is not None
    if any(not p.is_replicate() and p.dim != 0 for p in weight.placements):  # type: ignore[attr-defined]
        return _distributed(part.dequantize(), weight).full_tensor()
    rows = part if isinstance(part, StoredRows) else part.as_rows()
    qdata, exponents = (_joined(x, weight) for x in rows.as_bytes())
    found = StoredRows(qdata.view(FORMATS[rows.spec.format].dtype), exponents, rows.spec, rows.dtype, rows.cols)
    return StoredWeight(*read_operand(found, rows.spec, False), rows.spec, rows.dtype)  # type: ignore[arg-type]


def _joined(local: Tensor, like: DTensor) -> Tensor:
    """A part of each row of ``like``, from all ranks."""
    shape = torch.Size((like.shape[0], local.shape[1]))
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=(shape[1], 1)
    ).full_tensor()


def reshard(layers: Iterable[nn.Module]) -> None:
    """Have FSDP2 drop what it gathered of the weights of these layers; no rank sends anything."""
    for managed in managed_weights(layers).values():
        if not managed.is_sharded:
            managed.shard_again()


def put(layer: nn.Module, parameter: nn.Parameter) -> None:
    """Give a layer another sharded weight, in the place of the one that FSDP2 manages if it does."""
    managed = _managed(layer)
    if managed is None:
        layer._parameters["weight"] = parameter
    else:
        managed.replace(parameter)


def check_stored_gather(shard: StoredRows) -> None:
    """Check how FSDP2 gathers a stored weight; each rank calls this before the first gather of a shard.

    Raises:
        ValueError: it shards the weight by columns, reshards it to fewer ranks, or hands it on in float16.
    """
    for managed in all_managed():
        if stored_part(managed.param.sharded_param) is not shard:
            continue
        if reason := _why_not(managed):
            raise ValueError(f"{managed.name} is stored in 8 bits, and {reason}")


def _why_not(managed: Managed) -> str | None:
    if managed.shard_dim != 0:
        return "FSDP2 can shard such a weight by rows only: have shard_placement_fn return None for it"
    if managed.reshards_to_fewer:
        return (
            "FSDP2 cannot reshard such a weight to fewer ranks: give fully_shard reshard_after_forward=True or False, "
            "not a number"
        )
    dtype = managed.param_dtype
    if dtype is not None and dtype not in DTYPES:
        return f"such a weight serves layers in bfloat16 or float32; got a MixedPrecisionPolicy of {dtype}"
    return None


register_stored_sharding(StoredSharding(store_sharded, shard, values_of, whole, reshard, put))
