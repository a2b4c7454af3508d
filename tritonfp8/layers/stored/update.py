"""What an optimizer reads and writes of a stored weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.layers.linear import is_distributed
from tritonfp8.layers.stored.direct import register_writer
from tritonfp8.layers.stored.rows import StoredRows
from tritonfp8.layers.stored.sharding import sharding, stored_part
from tritonfp8.layers.stored.weight import StoredWeight
from tritonfp8.specs import QuantSpec


class StoredPart(NamedTuple):
    """The part of a stored weight that lies on this rank, as :func:`tritonfp8.reference.adamw` takes it.

    Attributes:
        weight: the part as a tensor.
        qdata: its codes ``[n, k]``.
        scale: float32, or exponents in one byte.
        spec: of the whole weight.
        scale_block: the rows and columns that one element of ``scale`` serves.
        place: row and column of the first element in the whole weight.
    """

    weight: StoredWeight | StoredRows
    qdata: Tensor
    scale: Tensor
    spec: QuantSpec
    scale_block: tuple[int, int]
    place: tuple[int, int]

    def changed(self) -> None:
        """Have torch count a write, as it does for the weight of any other optimizer."""
        torch.autograd.graph.increment_version(self.weight)


def part_to_update(weight: Tensor) -> StoredPart | None:
    """The part of a weight that this rank updates; None if the weight is not stored in 8 bits."""
    part = stored_part(weight)
    if part is None:
        return None
    if isinstance(part, StoredWeight):
        return StoredPart(part, *part._both(), part.spec, part.spec.block, (0, 0))
    place = sharding().place(weight) if is_distributed(weight) else (0, 0)
    return StoredPart(part, *part._both(), part.spec, (1, part.cols), place)


def _turned(x: Tensor, weight: Tensor) -> Tensor:
    """From the dims of a weight to those of its codes, or back."""
    part = stored_part(weight)
    return x.t() if isinstance(part, StoredWeight) and part.is_transposed else x


def gradient_of(weight: Tensor, grad: Tensor | None = None) -> Tensor:
    """The part of a gradient, or of another tensor of the shape of the weight, that belongs to this rank's codes.

    Args:
        weight: a stored weight.
        grad: by default that of the weight.
    """
    grad = weight.grad if grad is None else grad
    assert grad is not None
    local = sharding().local(grad, weight) if is_distributed(weight) else grad
    return _turned(local, weight)


def distribute(x: Tensor, weight: Tensor) -> Tensor:
    """The inverse of :func:`gradient_of`: a DTensor if the weight is one."""
    x = _turned(x, weight)
    return sharding().distribute(x, weight) if is_distributed(weight) else x


def starts_of(weight: Tensor) -> tuple[Sequence[int], Sequence[int]]:
    """The rows, and the columns, at which the parts of ranks begin."""
    return sharding().starts(weight) if is_distributed(weight) else ((0,), (0,))


def write_values(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Store values in place, rounded to nearest (ties away from zero), by scales of the whole weights.

    Args:
        weights: stored ones. Ranks that share one call this together.
        values: float32, as the weights are sharded.
    """
    _write(weights, [gradient_of(weight, x) for weight, x in zip(weights, values, strict=True)])


def write_parts(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """As :func:`write_values`, of the values of this rank's parts."""
    _write(weights, [_turned(x, weight) for weight, x in zip(weights, values, strict=True)])


def _write(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    jobs = []
    for weight, x in zip(weights, values, strict=True):
        part = part_to_update(weight)
        assert part is not None
        x = x.float().contiguous()
        zeros = torch.zeros_like(x)
        # A step of AdamW from nothing: the weight times 0, minus the value as first moment over 1, times -1.
        numbers = torch.zeros(8, device=x.device)
        numbers[4], numbers[6] = -1, 1
        jobs.append((part, (part.qdata, part.scale, x.clone(), zeros, zeros, numbers)))

    def layout(part: StoredPart) -> tuple[str, list[int], list[int]]:
        return part.spec.args[0], list(part.scale_block), list(part.place)

    amaxes = whole_amaxes(weights, lambda i: ops.adamw_amax(*jobs[i][1], *layout(jobs[i][0])))
    for (part, tensors), amax in zip(jobs, amaxes, strict=True):
        if part.qdata.numel():
            keys = torch.zeros(4, dtype=torch.int32, device=part.qdata.device)
            ops.adamw(*tensors, keys, *layout(part), False, None, None, amax)
        part.changed()


register_writer(write_parts)


def whole_amaxes(weights: Sequence[Tensor], amax: Callable[[int], Tensor]) -> list[Tensor | None]:
    """The amaxes of blocks that several ranks have a part of, by one reduction over all weights.

    Args:
        weights: stored ones. Ranks that share one call this together.
        amax: ``amax(i)``, the amaxes of the blocks that this rank's part of ``weights[i]`` lies in.

    Returns:
        For each weight the amaxes of these blocks over all ranks; None if each of its blocks lies on one rank.
    """
    if not any(map(is_distributed, weights)):
        return [None] * len(weights)
    return sharding().amaxes(weights, amax)
