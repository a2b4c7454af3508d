""":func:`tritonfp8.quantize_weights_once` on weights that FSDP2 and tensor parallelism shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from tritonfp8.distributed.fsdp import Float8AllGather, Managed, gather_of, managed_of
from tritonfp8.layers.extensions import WholeTogether
from tritonfp8.layers.linear import ConvertedLayer


@contextmanager
def _whole(group: Any) -> Iterator[None]:
    """Gather the weights of one parameter group of FSDP2, unless they are whole already."""
    managed = Managed(group, None)
    sharded = managed.is_sharded
    managed.gather_now()
    try:
        yield
    finally:
        if sharded:
            managed.shard_again()


def whole_together(layers: Any) -> list[WholeTogether]:
    """The layers whose weights FSDP2 shards: by the object that gathers them in 8 bits, else by parameter group."""
    managed = {layer: found for (layer, name), found in managed_of(layers.values()).items() if name == "weight"}
    found: dict[Any, dict[str, ConvertedLayer]] = {}
    for name, layer in layers.items():
        if layer in managed:
            found.setdefault(gather_of(layer) or managed[layer].group, {})[name] = layer

    def stored(layer: ConvertedLayer) -> Sequence[Tensor]:
        return [managed[layer].param.sharded_param]

    groups = []
    for owner, members in found.items():
        if isinstance(owner, Float8AllGather):
            keeps = partial(owner.keeping_segments, members)
            groups.append(WholeTogether(members, keeps, stored, keeps))
        else:
            groups.append(WholeTogether(members, partial(_whole, owner), stored))
    return groups
