"""The only door from layers to :mod:`tritonfp8.distributed`: what it does for tensors that ranks share.

The layers do not import it: where they meet such a tensor, :func:`distributed` does, and it fills one record.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import Tensor, nn


class WholeTogether(NamedTuple):
    """Layers whose weights become whole together, because FSDP2 gathers them together.

    Attributes:
        layers: by name.
        whole: a context in which each layer has the weight that its forward reads.
        stored: the tensors that hold the weight of a layer between forwards.
        keeps_codes: a context in which the gather sends codes that it keeps; None if the layer quantizes the weight.
    """

    layers: Mapping[str, Any]
    whole: Callable[[], AbstractContextManager[object]]
    stored: Callable[[Any], Sequence[Tensor]]
    keeps_codes: Callable[[], AbstractContextManager[object]] | None = None


class Extensions(NamedTuple):
    """The functions of :mod:`tritonfp8.distributed` that layers call. All ranks call ``store`` and ``whole`` together.

    Attributes:
        tensor_type: DTensor.
        linear: :func:`tritonfp8.functional.linear` where an operand is a DTensor; all arguments by position.
        sources: entries for :data:`SOURCES`.
        carried: a context manager, made when a forward begins; its recompute enters it, to restore the options.
        whole_together: from the layers to those whose weights FSDP2 shards.
        quantize: ``quantize(weight, recipe, needs_grad_input)`` of a weight that is a DTensor.
        check_gather: ``check_gather(shard)`` of a stored weight, before its first gather by FSDP2.
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

    tensor_type: type
    linear: Callable[..., Tensor]
    sources: Mapping[type, Any]
    carried: Callable[[], AbstractContextManager[object]]
    whole_together: Callable[[Mapping[str, Any]], list[WholeTogether]]
    quantize: Callable[..., Any]
    check_gather: Callable[[Any], None]
    store: Callable[[nn.Module, str, Tensor, Any], Tensor]
    shard: Callable[[nn.Module, str, Any], Tensor]
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


# A table and no attribute of the types, which Dynamo cannot read of a tensor that a graph makes.
SOURCES: dict[type, Any] = {}
"""By the type of a weight with codes: the :class:`~tritonfp8.layers.linear.WeightSource` of its operands."""
_filled: Extensions | None = None


def fill(record: Extensions) -> None:
    """Let layers use these functions; :mod:`tritonfp8.distributed` calls it once."""
    global _filled
    _filled = record
    SOURCES.update(record.sources)


def filled() -> Extensions | None:
    """The record; None where nothing has imported :mod:`tritonfp8.distributed`."""
    return _filled


def distributed() -> Extensions:
    """The record, imported on demand."""
    importlib.import_module("tritonfp8.distributed")
    assert _filled is not None
    return _filled
