"""Weights that are stored in 8 bits, sharded by FSDP2 and tensor parallelism: made, read and replaced."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from tritonfp8.distributed.collectives import all_reduce
from tritonfp8.distributed.fsdp import Managed, managed_of, managed_parameters
from tritonfp8.distributed.shard_layout import Interval, Mesh, chunk, distributed, distributed_as, interval, plain_mesh
from tritonfp8.layers.stored import (
    DTYPES,
    MatricesShard,
    StoredMatrices,
    StoredRows,
    StoredWeight,
    store,
    stored_part,
)
from tritonfp8.specs import QuantSpec, scale_shape
from tritonfp8.specs.formats import FORMATS


def _cut(x: Tensor, like: DTensor) -> Tensor:
    mesh = Mesh(*plain_mesh(like.device_mesh))
    for dim, size in enumerate(like.shape):
        x = x.narrow(dim, *interval(size, dim, like.placements, mesh))
    return x


@torch.no_grad()
def shard(layer: nn.Module, name: str, stored: StoredWeight, like: Tensor | None = None) -> Tensor:
    """This rank's part of a whole stored weight, as a DTensor that lies as a parameter of the layer does.

    Args:
        layer: whose parameter it becomes.
        name: of the parameter.
        stored: the same on all ranks.
        like: the DTensor whose placements it gets; by default the parameter.
    """
    like = layer._parameters[name] if like is None else like
    assert isinstance(like, DTensor)
    part = _cut(stored.as_shard(), like).clone()
    assert isinstance(part, StoredRows | MatricesShard)
    managed = managed_of([layer]).get((layer, name))
    part.total = None if managed is None else managed.shape[0]
    return distributed_as(part, like)


@torch.no_grad()
def split_experts(stored: StoredMatrices, mesh: DeviceMesh) -> DTensor:
    """A stored weight of experts, which all ranks have, as a DTensor that is sharded over them on a mesh of one dim."""
    here = chunk(Interval(0, stored.shape[0]), mesh.size(), mesh.get_local_rank())
    # A copy: the memory of the other experts is freed with the whole weight.
    part = stored.as_shard().narrow(0, *here).clone()
    return distributed(part, mesh, [Shard(0)], stored.shape)


def cut_as(x: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that each rank has the whole of, as a DTensor that lies as ``like`` does."""
    assert isinstance(like, DTensor)
    return distributed_as(_cut(x, like), like)


@torch.no_grad()
def store_sharded(layer: nn.Module, name: str, values: Tensor, spec: QuantSpec) -> Tensor:
    """The stored DTensor of a DTensor of values: gathers this one weight, because scales depend on the whole weight."""
    assert isinstance(values, DTensor)
    if values.ndim == 2:
        return shard(layer, name, store(values.full_tensor(), spec), values)
    is_transposed = bool(layer.is_transposed)
    return shard(layer, name, StoredMatrices.of(values.full_tensor(), spec, is_transposed), values)


def values_of(weight: Tensor) -> Tensor:
    """The plain DTensor of a stored one; no rank sends anything."""
    assert isinstance(weight, DTensor)
    part = stored_part(weight)
    assert part is not None
    return distributed_as(part.dequantize(), weight)


@torch.no_grad()
def whole(weight: Tensor) -> Tensor:
    """The whole of a stored DTensor, on each rank: a stored weight of the same codes.

    If ranks have parts of its rows (``RowwiseParallel``), it is a plain tensor of the values.
    """
    assert isinstance(weight, DTensor)
    part = stored_part(weight)
    assert part is not None
    if isinstance(part, StoredMatrices):
        codes, scales = part.as_bytes()
        qdata, scale = part.of_bytes(_joined(codes, weight), _joined(scales, weight))
        return StoredMatrices(qdata, scale, part.spec, part.dtype, part.is_transposed)
    if any(not p.is_replicate() and p.dim != 0 for p in weight.placements):  # type: ignore[attr-defined]
        return distributed_as(part.dequantize(), weight).full_tensor()
    rows = part if isinstance(part, StoredRows) else part.as_shard()
    assert isinstance(rows, StoredRows)
    qdata, exponents = (_joined(x, weight) for x in rows.as_bytes())
    found = StoredRows(qdata.view(FORMATS[rows.spec.format].dtype), exponents, rows.spec, rows.dtype, rows.cols)
    return StoredWeight(*found.read_operand(rows.spec, False), rows.spec, rows.dtype)


def _joined(local: Tensor, like: DTensor) -> Tensor:
    """Bytes ``[N, ...]`` of all ranks; ``local``: the bytes of this rank's rows, or experts, of ``like``."""
    shape = like.shape[0], *local.shape[1:]
    return distributed(local, like.device_mesh, like.placements, shape).full_tensor()


def reshard(layers: Iterable[nn.Module]) -> None:
    """Have FSDP2 drop what it gathered of the weights of these layers; no rank sends anything."""
    for managed in managed_of(layers).values():
        if not managed.is_sharded:
            managed.shard_again()


def put(layer: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Give a layer another sharded parameter, in the place of the one that FSDP2 manages if it does."""
    managed = managed_of([layer]).get((layer, name))
    if managed is None:
        layer._parameters[name] = parameter
    else:
        managed.replace(parameter)


def check_stored_gather(shard: StoredRows | MatricesShard) -> None:
    """Check how FSDP2 gathers a stored weight; each rank calls this before the first gather of a shard.

    Raises:
        ValueError: it shards the weight by columns, reshards it to fewer ranks, or hands it on in float16.
    """
    for managed in managed_parameters().values():
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


@functools.lru_cache(maxsize=4096)
def _starts(size: int, dim: int, placements: tuple[Placement, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    everywhere = itertools.product(*map(range, sizes))
    return tuple(sorted({interval(size, dim, placements, Mesh(sizes, here, ())).start for here in everywhere}))


def starts(weight: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The rows, and the columns, at which the parts of ranks begin."""
    assert isinstance(weight, DTensor)
    sizes = tuple(weight.device_mesh.shape)
    rows, cols = (_starts(weight.shape[dim], dim, weight.placements, sizes) for dim in (0, 1))
    return rows, cols


def place(weight: Tensor) -> tuple[int, int]:
    """Row and column of this rank's first element."""
    assert isinstance(weight, DTensor)
    mesh = Mesh(*plain_mesh(weight.device_mesh))
    row, col = (interval(weight.shape[dim], dim, weight.placements, mesh).start for dim in (0, 1))
    return row, col


def local(x: Tensor, weight: Tensor) -> Tensor:
    """This rank's part of a DTensor, cut as the weight is."""
    assert isinstance(x, DTensor)
    assert isinstance(weight, DTensor)
    found: Tensor = x.redistribute(weight.device_mesh, weight.placements).to_local()
    return found


def _shares_blocks(weight: Tensor, block: tuple[int, int]) -> bool:
    return any(
        len(found) > 1 and (size == -1 or any(start % size for start in found))
        for found, size in zip(starts(weight), block, strict=True)
    )


def _groups(weight: DTensor) -> tuple[str, ...]:
    """The process groups over which a weight is sharded."""
    names = plain_mesh(weight.device_mesh)[2]
    return tuple(name for name, p in zip(names, weight.placements, strict=True) if not p.is_replicate())


def whole_amaxes(weights: Sequence[Tensor], amax: Callable[[int], Tensor]) -> list[Tensor | None]:
    """See :func:`tritonfp8.layers.stored.whole_amaxes`: one MAX over each process group that shards some weight."""
    batches: dict[tuple[str, ...], list[int]] = {}
    for i, weight in enumerate(weights):
        part = stored_part(weight)
        assert part is not None
        if isinstance(weight, DTensor) and _shares_blocks(weight, part.spec.block):
            batches.setdefault(_groups(weight), []).append(i)
    found: list[Tensor | None] = [None] * len(weights)
    for groups, batch in batches.items():
        shapes = [scale_shape(weights[i].shape, _block(weights[i])) for i in batch]
        device = stored_part(weights[batch[0]]).device  # type: ignore[union-attr]
        bits = torch.zeros(sum(map(math.prod, shapes)), dtype=torch.int32, device=device)
        grids = [x.view(shape) for x, shape in zip(bits.split([*map(math.prod, shapes)]), shapes, strict=True)]
        for i, grid in zip(batch, grids, strict=True):
            if stored_part(weights[i]).numel():  # type: ignore[union-attr]
                here = amax(i)
                _part_of(grid, weights[i], here.shape).copy_(here.view(torch.int32))
                found[i] = here
        for group in groups:
            # The bits of non-negative floats are ordered as integers, with NaN on top. A MAX of floats may drop a NaN.
            bits = all_reduce(bits, "max", group)
        grids = [x.view(shape) for x, shape in zip(bits.split([*map(math.prod, shapes)]), shapes, strict=True)]
        for i, grid in zip(batch, grids, strict=True):
            if (before := found[i]) is not None:
                found[i] = _part_of(grid, weights[i], before.shape).contiguous().view(torch.float32)
    return found


def _block(weight: Tensor) -> tuple[int, int]:
    part = stored_part(weight)
    assert part is not None
    return part.spec.block


def _part_of(grid: Tensor, weight: Tensor, shape: Sequence[int]) -> Tensor:
    """The blocks of a weight's grid that this rank's part lies in."""
    for dim, (start, size, count) in enumerate(zip(place(weight), _block(weight), shape, strict=True)):
        grid = grid.narrow(dim, 0 if size == -1 else start // size, count)
    return grid
