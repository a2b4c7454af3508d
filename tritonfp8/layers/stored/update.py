"""What an optimizer reads and writes of a stored weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.layers.extensions import distributed
from tritonfp8.layers.linear import is_distributed
from tritonfp8.layers.stored.direct import STEP, register_writer
from tritonfp8.layers.stored.rows import StoredRows
from tritonfp8.layers.stored.sharding import stored_part
from tritonfp8.layers.stored.weight import StoredWeight
from tritonfp8.specs import QuantSpec
from tritonfp8.specs.formats import BYTE_FORMATS, SCALE_FORMATS


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

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the elements."""
        return self.spec.shape_of(self.qdata.shape)

    def changed(self) -> None:
        """Have torch count a write, as it does for the weight of any other optimizer, and find scales of rows again."""
        self.weight._find_row_scale()
        torch.autograd.graph.increment_version(self.weight)


def part_to_update(weight: Tensor) -> StoredPart | None:
    """The part of a weight that this rank updates; None if the weight is not stored in 8 bits."""
    part = stored_part(weight)
    if part is None:
        return None
    if isinstance(part, StoredWeight):
        return StoredPart(part, *part._both(), part.spec, part.spec.block, (0, 0))
    place = distributed().place(weight) if is_distributed(weight) else (0, 0)
    return StoredPart(part, *part._both(), part.spec, (1, part.cols), place)


def _turned(x: Tensor, weight: Tensor) -> Tensor:
    """From the dims of a weight to the dims of its codes, or back."""
    part = stored_part(weight)
    return x.mT if isinstance(part, StoredWeight) and part.is_transposed else x


def gradient_of(weight: Tensor, grad: Tensor | None = None) -> Tensor:
    """The part of a gradient, or of another tensor of the shape of the weight, that belongs to this rank's codes.

    Args:
        weight: a stored weight.
        grad: default: ``weight.grad``.
    """
    grad = weight.grad if grad is None else grad
    assert grad is not None
    local = distributed().local(grad, weight) if is_distributed(weight) else grad
    return _turned(local, weight)


def distribute(x: Tensor, weight: Tensor) -> Tensor:
    """The inverse of :func:`gradient_of`: a DTensor if the weight is one."""
    x = _turned(x, weight)
    return distributed().distribute(x, weight) if is_distributed(weight) else x


def starts_of(weight: Tensor) -> tuple[Sequence[int], Sequence[int]]:
    """The rows, and the columns, at which the parts of ranks begin."""
    return distributed().starts(weight) if is_distributed(weight) else ((0,), (0,))


def write_values(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Store values in place, rounded to nearest (ties away from zero), by scales of the whole weights.

    Args:
        weights: stored ones. Ranks that share one call this together.
        values: float32, as the weights are sharded.
    """
    _write(weights, [gradient_of(weight, x) for weight, x in zip(weights, values, strict=True)], False)


def write_parts(weights: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Store the values of this rank's parts, rounded up or down at random.

    The random bits depend on the step, in which an optimizer is; else on the codes before and on the number of earlier
    calls for the weight. Replicas that make the same calls get the same codes, and a change that is lost in one call is
    not lost in each.
    """
    _write(weights, [_turned(x, weight) for weight, x in zip(weights, values, strict=True)], True)


# An attribute of the codes of a weight, which all its aliases share: the number of writes that were rounded at random.
_CALLS = "_tritonfp8_writes"


def _keys(part: StoredPart, place: int) -> Tensor:
    """The keys of the random bits of one write."""
    codes: Any = part.weight._qdata
    if (step := getattr(codes, STEP, None)) is not None:
        keys = step.keys(part.qdata.device)
        return torch.cat([keys, keys.new_zeros(2)])
    calls = getattr(codes, _CALLS, 0)
    setattr(codes, _CALLS, calls + 1)
    content = part.qdata.view(torch.uint8).sum(dtype=torch.int64)[None] + place
    keys = ops.rounding_keys(0, torch.full_like(content, calls, dtype=torch.float64), content)[0]
    return torch.cat([keys, keys.new_zeros(2)])


def _write(weights: Sequence[Tensor], values: Sequence[Tensor], at_random: bool) -> None:
    jobs, owners = [], []
    for i, (weight, x) in enumerate(zip(weights, values, strict=True)):
        whole = part_to_update(weight)
        assert whole is not None
        for part, of_part in _matrices(whole, x):
            if part.spec.format not in BYTE_FORMATS:
                _write_packed(part, of_part.float().contiguous(), _keys(part, i) if at_random else None)
                continue
            jobs.append((part, _as_step(part, of_part)))
            owners.append(weight)

    def layout(part: StoredPart) -> tuple[str, list[int], list[int]]:
        return part.spec.args[0], list(part.scale_block), list(part.place)

    amaxes = whole_amaxes(owners, lambda i: ops.adamw_amax(*jobs[i][1], *layout(jobs[i][0])))
    for i, ((part, tensors), amax) in enumerate(zip(jobs, amaxes, strict=True)):
        if part.qdata.numel():
            keys = _keys(part, i) if at_random else torch.zeros(4, dtype=torch.int32, device=part.qdata.device)
            is_negative_zero = (tensors[2] == 0) & tensors[2].signbit() if at_random else None
            ops.adamw(*tensors, keys, *layout(part), at_random, None, None, amax)
            if is_negative_zero is not None:
                # The step subtracts, and nothing minus a zero is a positive zero.
                part.qdata.view(torch.uint8)[is_negative_zero] |= 0x80
        part.changed()


def _write_packed(part: StoredPart, x: Tensor, keys: Tensor | None) -> None:
    """Store values as codes of several a byte, whose blocks no other rank has a part of; to nearest without keys."""
    scale = part.scale.view(SCALE_FORMATS[part.spec.scale_format].dtype)
    if keys is None:
        ops.quantize_into(part.qdata, scale, x, *part.spec.args)
    elif x.numel():
        ops.quantize_at_random(part.qdata, scale, x, keys, *part.spec.args, list(part.place))
    part.changed()


def _matrices(part: StoredPart, x: Tensor) -> Iterator[tuple[StoredPart, Tensor]]:
    """A matrix and its values; of experts each matrix and its values."""
    if part.qdata.ndim == 2:
        yield part, x
        return
    for qdata, scale, values in zip(part.qdata, part.scale, x, strict=True):
        yield part._replace(qdata=qdata, scale=scale), values


def _as_step(part: StoredPart, x: Tensor) -> tuple[Tensor, ...]:
    """Arguments of a step of AdamW whose result is ``x``.

    It starts from nothing: the weight times 0, minus the value as first moment over 1, times -1.
    """
    x = x.float().contiguous()
    zeros = torch.zeros_like(x)
    numbers = torch.zeros(8, device=x.device)
    numbers[4], numbers[6] = -1, 1
    return part.qdata, part.scale, x.clone(), zeros, zeros, numbers


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
    return distributed().amaxes(weights, amax)
