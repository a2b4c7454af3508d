"""The way of tokens to experts and back, on the device: nothing is read on the host, and no shape depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.layers.linear import Pair
from tritonfp8.specs import QuantSpec


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
        # GPUs sort by a byte at a time: two launches, where 64 bits take eight.
        ids = top_k_index.reshape(-1).clamp(max=experts).to(torch.int16 if experts < 2**15 else torch.int64)
        # Stable, so that the rows of an expert keep the order of their tokens, and each run has the same bits.
        found, order = torch.sort(ids, stable=True)
        ends = torch.searchsorted(found, torch.arange(experts, dtype=ids.dtype, device=ids.device), right=True)
        rows = torch.arange(order.shape[0], device=ids.device)
        return Routing(ends.to(torch.int32), order, torch.empty_like(order).scatter_(0, order, rows))


class Travel(Protocol):
    """How rows get to the ranks of their experts and back; all ranks call each method together."""

    @property
    def rows(self) -> int:
        """How many rows this rank sends: the rows of no expert, which are its last, stay."""

    def there(self, pair: Pair, spec: QuantSpec, there: Routing) -> Pair:
        """The codes and scales by ``spec`` of the rows of this rank's experts, from the rows of this rank's tokens."""

    def back(self, rows: Tensor, there: Routing, number: int) -> Tensor:
        """``number`` rows for this rank's tokens, zeros for no expert, from the rows of this rank's experts."""


class Way(NamedTuple):
    """The way of tokens to the rows of their experts.

    Attributes:
        here: the routing of this rank's tokens to all experts.
        there: the routing of the rows that arrived to the experts of this rank; ``here`` if none travel.
        travel: None if all experts are here.
    """

    here: Routing
    there: Routing
    travel: Travel | None = None

    @property
    def args(self) -> tuple[Any, ...]:
        """The fields, flat, as the arguments of an autograd function, which must differ for Dynamo."""
        return self.travel, *self.here, *((None, None, None) if self.travel is None else self.there)

    @classmethod
    def of(cls, args: Sequence[Any], ctx: Any = None) -> tuple[Way, list[Any]]:
        """The way that begins with these :attr:`args`, and the arguments behind them.

        ``ctx``: of a backward that saved the arguments, and may then free them, unless the graph is kept.
        """
        if ctx is not None and not torch.compiler.is_compiling():
            ctx.maybe_clear_saved_tensors()
        travel, *tensors = args
        here = Routing(*tensors[:3])
        return cls(here, here if travel is None else Routing(*tensors[3:6]), travel), tensors[6:]


class _Gather(torch.autograd.Function):
    """The rows of all experts. Its gradient adds a token's rows in the order of its experts, not as they come."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.tokens = hidden.shape[0]
        return hidden[tokens_of_rows(order, hidden.shape[0])]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return ops.sum_of_rows(grad, places_of(inverse, ctx.tokens)), None, None


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


class _Combine(torch.autograd.Function):
    """The sum of the experts of each token, without a copy of the rows in the order of the tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        top_k_weights: Tensor,
        order: Tensor,
        inverse: Tensor,
        needs_rows: bool,
        needs_factors: bool,
    ) -> Tensor:
        ctx.save_for_backward(rows if needs_factors else None, top_k_weights, order, inverse)
        ctx.needs_rows, ctx.dtype = needs_rows, rows.dtype
        return ops.sum_of_rows(rows, places_of(inverse, top_k_weights.shape[0]), top_k_weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, top_k_weights, order, inverse = ctx.saved_tensors
        grad_rows = None
        if ctx.needs_rows:
            factors = top_k_weights.reshape(-1)[order]
            grad_rows = (grad[tokens_of_rows(order, grad.shape[0])] * factors[:, None]).to(ctx.dtype)
        grad_factors = None if rows is None else grad_of_factors(grad, rows, inverse, top_k_weights)
        return grad_rows, grad_factors, None, None, None, None


def tokens_of_rows(order: Tensor, tokens: int) -> Tensor:
    """The token of each row."""
    return order // (order.shape[0] // max(1, tokens)) if order.shape[0] else order


def places_of(inverse: Tensor, tokens: int) -> Tensor:
    """The rows of each token, ``[tokens, top_k]``."""
    return inverse.view(tokens, inverse.shape[0] // max(1, tokens))


def grad_of_factors(grad: Tensor, rows: Tensor | None, inverse: Tensor, top_k_weights: Tensor) -> Tensor | None:
    """The gradient of the weights of each token's experts; None without ``rows``.

    Args:
        grad: of the sums.
        rows: the rows that were added.
        inverse: of the routing.
        top_k_weights: ``[T, top_k]``.
    """
    if rows is None:
        return None
    # places_of divides the rows by the tokens, and a rank may have none of either.
    return ops.dots_of_rows(grad, rows, inverse.view(top_k_weights.shape), top_k_weights.dtype)


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
    grad = torch.is_grad_enabled()
    needs = (grad and rows.requires_grad, grad and top_k_weights.requires_grad)
    out: Tensor = _Combine.apply(rows, top_k_weights, routing.order, routing.inverse, *needs)  # type: ignore[no-untyped-call]
    return in_dtype(out, dtype)


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``."""
    # No cast to its own dtype: compiled by torch 2.11, an autograd.Function that returns one gets gradients of zero.
    return x if x.dtype == dtype else x.to(dtype)
