"""The way of tokens to experts and back, on the device: nothing is read on the host, and no shape depends on it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """Where the rows of the grouped GEMMs come from. A row is one token at one of its experts.

    Attributes:
        offsets: ``[E]``, int32: the end of each expert's rows.
        order: ``[T * top_k]``: the row of ``top_k_index.flatten()`` that each row is.
        inverse: the row that each entry of ``top_k_index.flatten()`` became.
    """

    offsets: Tensor
    order: Tensor
    inverse: Tensor

    @staticmethod
    def of(top_k_index: Tensor, experts: int) -> Routing:
        """The routing of ``top_k_index [T, top_k]``. Indices from ``experts`` on stand for no expert."""
        ids = top_k_index.reshape(-1)
        # Stable, so that the rows of an expert keep the order of their tokens, and each run has the same bits.
        found, order = torch.sort(ids, stable=True)
        ends = torch.searchsorted(found, torch.arange(experts, device=ids.device), right=True)
        return Routing(ends.to(torch.int32), order, torch.argsort(order))


class _Gather(torch.autograd.Function):
    """The rows of all experts. Its gradient adds those of a token in the order of its experts, not as they come."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.tokens = hidden.shape[0]
        return hidden[order // (order.shape[0] // max(1, hidden.shape[0]))] if order.shape[0] else hidden[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return sum_of_experts(grad[inverse], ctx.tokens), None, None


class _Permute(torch.autograd.Function):
    """Rows in another order. Each row is read once, so the gradient needs no atomics."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None


def sum_of_experts(rows: Tensor, tokens: int) -> Tensor:
    """The sum of the rows of each token, which are adjacent, ``[tokens, K]``."""
    # torch sums bfloat16 in float32, and rounds once.
    return rows.view(tokens, -1 if tokens else 1, rows.shape[-1]).sum(1)


def permute(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """``rows[order]``; ``inverse`` undoes it."""
    return _Permute.apply(rows, order, inverse)  # type: ignore[no-untyped-call]


def gather(hidden: Tensor, routing: Routing) -> Tensor:
    """``hidden [T, K]`` as the rows of all experts, ``[T * top_k, K]``."""
    return _Gather.apply(hidden, routing.order, routing.inverse)  # type: ignore[no-untyped-call]


def combine(rows: Tensor, routing: Routing, top_k_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of the experts of each token, each by its weight, ``[T, K]`` in ``dtype``.

    Args:
        rows: ``[T * top_k, K]``, what the experts returned.
        routing: of these rows.
        top_k_weights: ``[T, top_k]``.
        dtype: of the result.
    """
    return weighted_sum(permute(rows, routing.inverse, routing.order), top_k_weights, dtype)


def weighted_sum(ordered: Tensor, top_k_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """:func:`combine` of rows in the order of ``top_k_index.flatten()``."""
    out = sum_of_experts(ordered * top_k_weights.reshape(-1, 1), top_k_weights.shape[0])
    # No cast to its own dtype: compiled by torch 2.11, an autograd.Function that returns one gets gradients of zero.
    return out if out.dtype == dtype else out.to(dtype)
