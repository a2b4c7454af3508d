""":func:`tritonfp8.quantize_weights_once` on weights that FSDP2 and tensor parallelism shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from tritonfp8.distributed.fsdp import Managed, gather_of, managed_weights
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
    managed = managed_weights(layers.values())
    by_gather: dict[Any, dict[str, ConvertedLayer]] = {}
    by_group: dict[Any, dict[str, ConvertedLayer]] = {}
    for name, layer in layers.items():
        if layer in managed:
            gather = gather_of(layer)
            found = (
                by_group.setdefault(managed[layer].group, {}) if gather is None else by_gather.setdefault(gather, {})
            )
            found[name] = layer

    def stored(layer: ConvertedLayer) -> Sequence[Tensor]:
        return [managed[layer].param.sharded_param]

    groups = [WholeTogether(found, partial(_whole, group), stored) for group, found in by_group.items()]
    for gather, found in by_gather.items():
        keeps: Callable[[], AbstractContextManager[object]] = partial(gather.keeping_segments, found)
        groups.append(WholeTogether(found, keeps, stored, keeps))
    return groups
