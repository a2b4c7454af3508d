"""What ``tritonfp8.distributed`` does for stored weights: the core does not import it, and calls what it registers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tritonfp8.layers.linear import is_distributed
from tritonfp8.layers.stored.rows import StoredRows
from tritonfp8.layers.stored.weight import StoredWeight
from tritonfp8.specs import QuantSpec


class StoredSharding(NamedTuple):
    """What sharded weights need. ``store`` and ``whole`` are called on all ranks together.

    Attributes:
        store: ``store(layer, name, values, spec)``, the stored DTensor of a DTensor of values, for a parameter.
        shard: ``shard(layer, name, stored)``, this rank's part of a whole stored weight, a DTensor as the parameter is.
        values: ``values(weight)``, the plain DTensor of a stored one.
        whole: ``whole(weight)``, all of a stored DTensor: a stored weight, or a plain tensor of the values.
        reshard: ``reshard(layers)``, has FSDP2 drop what it gathered of their weights.
        put: ``put(layer, name, parameter)`` in place of a parameter of the layer, also where FSDP2 manages it.
        place: ``place(weight)``, row and column of this rank's first element.
        starts: ``starts(weight)``, the rows, and the columns, at which the parts of ranks begin.
        local: ``local(x, weight)``, this rank's part of ``x``, cut as the weight is.
        cut_as: ``cut_as(x, like)``, this rank's part of a tensor that each rank has: a DTensor that lies as ``like``.
        distribute: ``distribute(local, weight)``, a DTensor that lies as the weight does.
        amaxes: :func:`tritonfp8.layers.stored.whole_amaxes`, called on all ranks together.
    """

    store: Callable[[nn.Module, str, Tensor, QuantSpec], Tensor]
    shard: Callable[[nn.Module, str, StoredWeight], Tensor]
    values: Callable[[Tensor], Tensor]
    whole: Callable[[Tensor], Tensor]
    reshard: Callable[[Iterable[nn.Module]], None]
    put: Callable[[nn.Module, str, nn.Parameter], None]
    place: Callable[[Tensor], tuple[int, int]]
    starts: Callable[[Tensor], tuple[Sequence[int], Sequence[int]]]
    local: Callable[[Tensor, Tensor], Tensor]
    cut_as: Callable[[Tensor, Tensor], Tensor]
    distribute: Callable[[Tensor, Tensor], Tensor]
    amaxes: Callable[[Sequence[Tensor], Callable[[int], Tensor]], list[Tensor | None]]


_registered: list[StoredSharding] = []


def register_stored_sharding(sharding: StoredSharding) -> None:
    """Let stored weights be sharded."""
    _registered[:] = [sharding]


def sharding() -> StoredSharding:
    """The registered functions, imported on demand."""
    importlib.import_module("tritonfp8.distributed")
    return _registered[0]


def stored_part(weight: Tensor | None) -> StoredWeight | StoredRows | None:
    """What this rank has of a stored weight; None if the weight is not stored in 8 bits."""
    local = getattr(weight, "_local_tensor", None) if is_distributed(weight) else weight
    return local if isinstance(local, StoredWeight | StoredRows) else None


def plain_weight(weight: Tensor) -> Tensor:
    """The values of a stored weight, a DTensor if that is one; any other weight as it is."""
    part = stored_part(weight)
    if part is None:
        return weight
    return sharding().values(weight) if is_distributed(weight) else part.dequantize()


def reshard(layers: Iterable[nn.Module]) -> None:
    """Have FSDP2 drop what it gathered of the weights of these layers: a change of that would be lost with it."""
    # Without this module no weight is gathered, and tritonfp8.distributed is not needed.
    if "torch.distributed.fsdp" in sys.modules:
        sharding().reshard(layers)


def whole_weight(weight: Tensor) -> Tensor:
    """All of a stored weight if it is sharded, which all ranks call together; any other weight as it is."""
    is_sharded = is_distributed(weight) and stored_part(weight) is not None
    return sharding().whole(weight) if is_sharded else weight


@torch.no_grad()
def copy_whole(layer: nn.Module, weight: Tensor, x: Tensor) -> None:
    """Copy a tensor that each rank has the whole of into a parameter or buffer of ``layer``, which may be sharded.

    Args:
        layer: the module that has ``weight``.
        weight: a plain tensor, a stored weight, or a DTensor of either.
        x: values; or a stored weight, whose codes a stored one takes as they are.
    """
    if not is_distributed(weight):
        weight.copy_(x)
        return
    part = stored_part(weight)
    if part is None:
        weight.copy_(sharding().cut_as(x, weight))
        return
    kind = type(part) if isinstance(part, StoredWeight) else StoredWeight
    whole = x if isinstance(x, StoredWeight) and x.spec == part.spec else kind.of(plain_weight(x), part.spec)
    name = next(key for key, parameter in layer._parameters.items() if parameter is weight)
    source = stored_part(sharding().shard(layer, name, whole))
    assert source is not None
    part.copy_(source)


def spec_of_weight(weight: Tensor) -> QuantSpec:
    """The spec by which a weight is stored."""
    part = stored_part(weight)
    assert part is not None
    return part.spec
