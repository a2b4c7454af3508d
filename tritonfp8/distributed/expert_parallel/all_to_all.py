"""The all-to-all of rows between ranks, in 8 bits or as they are, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.distributed.collectives import all_to_all_rows
from tritonfp8.layers.linear import Pair
from tritonfp8.layers.moe import Routing
from tritonfp8.specs import QuantSpec, empty_scale
from tritonfp8.specs.formats import FORMATS, SCALE_FORMATS

# Every code times a power of two is exact in these. float16 has too few exponents.
_EXACT_IN = (torch.bfloat16, torch.float32)


def payload_of(spec: QuantSpec | None, dtype: torch.dtype) -> QuantSpec | None:
    """The spec in which rows may travel that a GEMM quantizes by ``spec``; None if they travel as they are.

    In 8 bits only where this changes no bit of that GEMM: each row has its own scales, which are powers of two. A row
    that was quantized once has the same values after it is quantized again.
    """
    if spec is None or spec.block[0] != 1 or dtype not in _EXACT_IN:
        return None
    exact = SCALE_FORMATS[spec.scale_format].exponent_only or spec.scale_rounding == "pow2"
    return spec if exact else None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        group: str,
        spec: QuantSpec | None,
        grad_spec: QuantSpec | None,
    ) -> Tensor:
        ctx.back = (receive, send, group, grad_spec)
        return _sent(rows, send, receive, group, spec)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _sent(grad, *ctx.back), None, None, None, None, None


def exchange(
    rows: Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    group: str,
    spec: QuantSpec | None = None,
    grad_spec: QuantSpec | None = None,
) -> Tensor:
    """Rows to other ranks, and theirs to this one; differentiable.

    Args:
        rows: ``[sum(send), K]``: first those for rank 0.
        send, receive: for each rank the number of rows.
        group: the name of the process group.
        spec, grad_spec: in which rows, and the gradient on its way back, travel; None: as they are.

    Returns:
        ``[sum(receive), K]``: first the rows of rank 0.
    """
    return _Exchange.apply(rows, send, receive, group, spec, grad_spec)  # type: ignore[no-untyped-call]


def part(weight: Any, by: int) -> Tensor:
    """This rank's part of a DTensor; its gradient has the strides of the part, and is divided by ``by``."""
    return _Part.apply(weight.to_local(), by)  # type: ignore[no-untyped-call]


def _sent(rows: Tensor, send: Sequence[int], receive: Sequence[int], group: str, spec: QuantSpec | None) -> Tensor:
    if spec is None:
        return all_to_all_rows(rows, send, receive, group)
    pair = ops.quantize(rows, *spec.args)
    return ops.dequantize(*_codes_there(pair, spec, send, receive, group, None), *spec.args, rows.dtype)


def _codes_there(
    pair: Pair, spec: QuantSpec, send: Sequence[int], receive: Sequence[int], group: str, order: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The codes and scales of the rows of other ranks for this one, in this order."""
    qdata, scale = pair
    assert qdata is not None
    assert scale is not None
    # 8-bit floats are sent as bytes: not every backend knows them. Flattened: the scales of consecutive rows may be
    # adjacent, where rows of one scale have any stride.
    of_rows = scale.reshape(-1).view(torch.uint8).view(len(scale), scale.shape[1] * scale.element_size())
    parts = [qdata.view(torch.uint8), of_rows]
    codes, scales = (_ordered(all_to_all_rows(part, send, receive, group), order) for part in parts)
    qdata = codes.view(FORMATS[spec.format].dtype)
    scale = empty_scale(qdata.shape, spec.block, spec.scale_format, qdata.device)
    return qdata, scale.copy_(scales.reshape(-1).view(scale.dtype).view(scale.shape))


def _ordered(rows: Tensor, order: Tensor | None) -> Tensor:
    """Rows of bytes in this order. Eight bytes are moved as one element, where they fit."""
    if order is None:
        return rows
    return rows.view(torch.int64)[order].view(torch.uint8) if rows.shape[1] % 8 == 0 else rows[order]


@dataclass(frozen=True)
class CodesTravel:
    """A :class:`~tritonfp8.layers.moe.Travel` by all-to-alls: codes and scales there, results back as they are.

    Attributes:
        send, receive: for each rank the number of rows.
        group: the name of the process group.
    """

    send: Sequence[int]
    receive: Sequence[int]
    group: str

    @property
    def rows(self) -> int:
        """The rows for all ranks."""
        return sum(self.send)

    def there(self, pair: Pair, spec: QuantSpec, there: Routing) -> Pair:
        """Rows arrive by rank, and are sorted by expert."""
        return _codes_there(pair, spec, self.send, self.receive, self.group, there.order)

    def back(self, rows: Tensor, there: Routing, number: int) -> Tensor:
        """The way of :meth:`there` in reverse."""
        rows = rows[there.inverse]
        found = all_to_all_rows(rows, self.receive, self.send, self.group)
        rest = number - self.rows
        return torch.cat([found, found.new_zeros(rest, found.shape[1])]) if rest else found


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: int) -> Tensor:
        ctx.by, ctx.stride = by, x.stride()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad if ctx.by == 1 else grad / ctx.by
        if grad.stride() != ctx.stride:
            # Autograd would else copy the DTensor around it. torch 2.11 gathers uneven shards for that, only on the
            # ranks that need the copy, which then wait for the others.
            grad = grad.new_empty_strided(grad.shape, ctx.stride).copy_(grad)
        return grad, None
