"""Stored weights that may be sharded: ``tritonfp8.distributed`` reads and changes what lies on several ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tritonfp8.layers.extensions import distributed
from tritonfp8.layers.linear import is_distributed
from tritonfp8.layers.stored.rows import StoredRows
from tritonfp8.layers.stored.weight import StoredWeight
from tritonfp8.specs import QuantSpec


def stored_part(weight: Tensor | None) -> StoredWeight | StoredRows | None:
    """What this rank has of a stored weight; None if the weight is not stored in 8 bits."""
    local = getattr(weight, "_local_tensor", None) if is_distributed(weight) else weight
    return local if isinstance(local, StoredWeight | StoredRows) else None


def plain_weight(weight: Tensor) -> Tensor:
    """The values of a stored weight, a DTensor if that is one; any other weight as it is."""
    part = stored_part(weight)
    if part is None:
        return weight
    return distributed().values(weight) if is_distributed(weight) else part.dequantize()


def reshard(layers: Iterable[nn.Module]) -> None:
    """Have FSDP2 drop what it gathered of the weights of these layers: a change of that would be lost with it."""
    # Without this module no weight is gathered, and tritonfp8.distributed is not needed.
    if "torch.distributed.fsdp" in sys.modules:
        distributed().reshard(layers)


def whole_weight(weight: Tensor) -> Tensor:
    """All of a stored weight if it is sharded, which all ranks call together; any other weight as it is."""
    is_sharded = is_distributed(weight) and stored_part(weight) is not None
    return distributed().whole(weight) if is_sharded else weight


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
        weight.copy_(distributed().cut_as(x, weight))
        return
    kind = type(part) if isinstance(part, StoredWeight) else StoredWeight
    whole = x if isinstance(x, StoredWeight) and x.spec == part.spec else kind.of(plain_weight(x), part.spec)
    name = next(key for key, parameter in layer._parameters.items() if parameter is weight)
    source = stored_part(distributed().shard(layer, name, whole))
    assert source is not None
    part.copy_(source)


def spec_of_weight(weight: Tensor) -> QuantSpec:
    """The spec by which a weight is stored."""
    part = stored_part(weight)
    assert part is not None
    return part.spec
