"""How a model takes a batch, and what it returns: its loss and its tensors; and the part of a tensor of this rank."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from tritonfp8.conversion import bare


def local_part(x: Any) -> Any:
    """The shard of this rank of a sharded tensor; any other tensor as it is."""
    return x.to_local() if hasattr(x, "to_local") else x


def keywords(model: nn.Module, batch: Any) -> Mapping[str, Any] | None:
    """``batch`` if it is a mapping of keywords that the model's forward takes, such as a tokenizer gives; else None."""
    if not isinstance(batch, Mapping) or not all(isinstance(key, str) for key in batch):
        return None
    try:
        inspect.signature(bare(model).forward).bind(**batch)
    except TypeError:
        return None
    return batch


def own_loss(output: Any) -> Tensor | None:
    """The loss in a model's output, such as a transformers output; None if it has none."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else None


def total(terms: Iterable[Tensor]) -> Tensor:
    """The sum of one or more scalars, on the device of the first: a model may be spread over several."""
    first, *others = terms
    for each in others:
        first = first + each.to(first.device)
    return first


def floating_tensors(output: Any) -> list[Tensor]:
    """The floating tensors of a model's output, inside of mappings, sequences and dataclasses, too."""
    return [x for x in _tensors(output) if x.is_floating_point()]


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for each in output.values():
            yield from _tensors(each)
    elif isinstance(output, Sequence) and not isinstance(output, str | bytes):
        for each in output:
            yield from _tensors(each)
    elif dataclasses.is_dataclass(output):
        for field in dataclasses.fields(output):
            yield from _tensors(getattr(output, field.name))
