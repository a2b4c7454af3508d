"""The ops of exact models with their gradients. The bits of a row of a result depend only on this row's own tokens.

Gradients promise no order of sums: training computes them once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.layers.linear import first_order


class _ExactLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.has_bias = bias is not None
        out: Tensor = ops.matmul(rows, weight, bias, batch_invariant=True)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        grad_rows = grad @ weight if ctx.needs_input_grad[0] else None
        grad_weight = grad.t() @ rows if ctx.needs_input_grad[1] else None
        return grad_rows, grad_weight, grad.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, unit_offset: bool) -> Tensor:
        out, rstd = ops.rms_norm(x, weight, eps, unit_offset)
        ctx.save_for_backward(x, weight, rstd)
        ctx.unit_offset = unit_offset
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        grads = first_order(lambda: ops.rms_norm_backward(grad, x, weight, rstd, ctx.unit_offset))
        return *grads, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return ops.gated(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return *first_order(lambda: ops.gated_backward(grad, gate, up, ctx.activation)), None


class _RowLogsumexp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, temperature: float) -> Tensor:
        found: Tensor = ops.row_logsumexp(x, temperature)
        ctx.save_for_backward(x, found)
        ctx.temperature = temperature
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, found = ctx.saved_tensors
        probabilities = (x.float() / ctx.temperature - found.unsqueeze(-1)).exp_()
        return (probabilities * (grad / ctx.temperature).unsqueeze(-1)).to(x.dtype), None


class _Routed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
        weights, indices = ops.routed(logits, top_k, normalize)
        ctx.save_for_backward(logits, weights, indices)
        ctx.normalize = normalize
        ctx.mark_non_differentiable(indices)
        return weights, indices

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None, None]:
        logits, weights, indices = ctx.saved_tensors
        shares = grad * weights
        total = shares.sum(-1, keepdim=True)
        if ctx.normalize:
            found = torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, indices, shares - weights * total)
        else:
            found = (torch.softmax(logits.float(), -1) * -total).scatter_add_(-1, indices, shares)
        return found.to(logits.dtype), None, None


class _ExactAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, places: Tensor | None) -> Tensor:
        out, logsumexp = ops.exact_attention(q, k, v, scale, window, places)
        ctx.save_for_backward(q, k, v, out, logsumexp, places)
        ctx.scale, ctx.window = scale, window
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp, places = ctx.saved_tensors
        args = (grad.contiguous(), q, k, v, out, logsumexp, ctx.scale, ctx.window, places)
        return *first_order(lambda: ops.exact_attention_backward(*args)), None, None, None


def exact_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input [..., K] @ weight [N, K].T + bias [N]``, ``[..., N]``. K is never split."""
    # The shape is put back outside of the function: models write to such a view in place.
    rows = input.reshape(-1, input.shape[-1])
    out: Tensor = _ExactLinear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return out.view(*input.shape[:-1], weight.shape[0])


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> Tensor:
    """RMSNorm (Zhang and Sennrich 2019) of the last dim, with the roundings of Llama, or (``unit_offset``) of Gemma.

    Args:
        x: ``[..., K]``.
        weight: ``[K]``.
        eps: is added to the mean of squares.
        unit_offset: whether the factor is ``1 + weight``.
    """
    return _RmsNorm.apply(x, weight, eps, unit_offset)  # type: ignore[no-untyped-call]


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up``; ``activation`` is silu, gelu, gelu_tanh or relu."""
    return _Gated.apply(gate, up, activation)  # type: ignore[no-untyped-call]


def row_logsumexp(x: Tensor, temperature: float = 1.0) -> Tensor:
    """``log(sum(exp(x / temperature)))`` along the last dim, float32 ``[...]`` of ``x [..., K]``."""
    return _RowLogsumexp.apply(x, temperature)  # type: ignore[no-untyped-call]


def routed(logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """The experts with the largest logits, and their softmax. Equal logits: the expert with the lower index is first.

    Args:
        logits: ``[T, E]``.
        top_k: the number of experts of a token.
        normalize: whether the chosen weights of a token add up to 1.

    Returns:
        The weights, float32 ``[T, top_k]``, and the experts, int64 ``[T, top_k]``, the largest first.
    """
    return _Routed.apply(logits, top_k, normalize)  # type: ignore[no-untyped-call]


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0, places: Tensor | None = None) -> Tensor:
    """Causal attention, ``[B, T, Hq, D]``.

    Args:
        q: ``[B, Hq, T, D]``.
        k, v: ``[B, Hkv, S, D]``.
        scale: of the scores.
        window: how many keys a query sees at most; 0 for all.
        places: int32 ``[B, 2]``: the index among the keys of a sequence's first token, and of its first query. None:
            a sequence begins at key 0, and the queries are the last T keys.
    """
    return _ExactAttention.apply(q, k, v, scale, window, places)  # type: ignore[no-untyped-call]
