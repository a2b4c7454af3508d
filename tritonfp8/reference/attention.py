"""Attention in plain torch whose rows have bits of their own, and its gradient.

A row's bits depend on its query and the keys that it sees. They depend neither on the batch, nor on padding on the
left or right, nor on the length of a cache, nor on how many queries come in one call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonfp8.reference.exact import ordered_sum, row_products, row_units, unit_products, wide

SPLIT, SUB_TILE = 256, 64
"""Keys of a split, and of a step of the recurrence within it."""
_State = tuple[Tensor, Tensor, Tensor]


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0, places: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Causal attention in one order of sums, by an online softmax (Milakov and Gimelshein 2018).

    The keys of a sequence are cut into splits of :data:`SPLIT`, counted from the first key of the sequence. A split is
    summed by itself, in steps of :data:`SUB_TILE` keys, and the splits are merged in order. Keys, steps and splits that
    a row does not see change none of its bits.

    Args:
        q: ``[B, Hq, T, D]``.
        k: ``[B, Hkv, S, D]``; Hq is a multiple of Hkv.
        v: as ``k``.
        scale: factor of the products of ``q`` and ``k``, above 0.
        window: the number of keys that a query sees, its own with them; 0 for all.
        places: ``[B, 2]`` int32: the index among the keys of the sequence's first token, negative where a cache dropped
            it; and the index of the key of the first query. None: each sequence begins at key 0, and the queries are
            the last T keys.

    Returns:
        The result ``[B, T, Hq, D]`` contiguous, in the dtype of ``q``; and the logsumexp of each row's scaled products,
        ``[B, Hq, T]`` float32 (float64 for float64). A row without keys has 0 and -inf.
    """
    check_attention(q, k, v, places, scale, window)
    (b, hq, t, d), (_, hkv, s, _) = q.shape, k.shape
    first, query = _places(q, k, places)
    rows = (query[:, None] + torch.arange(t, device=q.device)).view(b, 1, 1, t, 1)
    queries = q.reshape(b, hkv, hq // hkv, t, d)
    total = _empty(queries)
    start, last = _bounds(first, query, t, s, window) if b and t else (0, 0)
    for split in range(start, last, SPLIT):
        part = _empty(queries)
        for step in range(split, min(split + SPLIT, last), SUB_TILE):
            index = first[:, None] + torch.arange(step, step + SUB_TILE, device=q.device)
            # Not behind the last query either: a cache may have anything there.
            exists = (index >= 0) & (index < (query[:, None] + t).clamp(max=s))
            at = index.view(b, 1, 1, 1, SUB_TILE)
            seen = exists.view(b, 1, 1, 1, SUB_TILE) & (at <= rows)
            if window:
                seen = seen & (at > rows - window)
            keys, values = (_taken(x, index, exists) for x in (k, v))
            part = _step(part, queries, keys, values, seen, scale)
        total = _merged(total, part)
    largest, weight, sums = total
    none = weight == 0
    out = torch.where(none, 0.0, sums / torch.where(none, 1.0, weight)).to(q.dtype)
    logsumexp = torch.where(none, -math.inf, largest + torch.where(none, 1.0, weight).log())
    return out.reshape(b, hq, t, d).transpose(1, 2).contiguous(), logsumexp.reshape(b, hq, t)


def _places(q: Tensor, k: Tensor, places: Tensor | None) -> tuple[Tensor, Tensor]:
    if places is None:
        first = torch.zeros(q.shape[0], dtype=torch.int64, device=q.device)
        return first, first + (k.shape[2] - q.shape[2])
    return places[:, 0].long(), places[:, 1].long()


def _bounds(first: Tensor, query: Tensor, t: int, s: int, window: int) -> tuple[int, int]:
    """Where the first split begins, and where the keys end, that any query sees; counted from ``first``."""
    seen = (query - window + 1).clamp(min=0) if window else torch.zeros_like(query)
    start = int((torch.maximum(seen, first) - first).amin())
    return start // SPLIT * SPLIT, int(((query + t).clamp(max=s) - first).amax())


def _empty(queries: Tensor) -> _State:
    """Maximum, sum of weights and weighted sum of values, without keys."""
    sums = queries.new_zeros(queries.shape, dtype=wide(queries.dtype))
    return sums.new_full((*sums.shape[:-1], 1), -math.inf), sums[..., :1].clone(), sums


def _taken(x: Tensor, index: Tensor, exists: Tensor) -> Tensor:
    """Rows of ``x [B, H, S, D]`` at ``index [B, n]``, ``[B, H, 1, n, D]``; zeros where there are none."""
    b, h, s, d = x.shape
    places = index.clamp(0, max(0, s - 1)).view(b, 1, -1, 1).expand(-1, h, -1, d)
    return torch.where(exists.view(b, 1, -1, 1), x.gather(2, places), 0.0).unsqueeze(2)


def _step(state: _State, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> _State:
    largest, weight, sums = state
    scores = row_products(q, k).to(sums.dtype) * scale
    scores = torch.where(seen, scores, -math.inf)
    raised = torch.maximum(largest, scores.amax(-1, keepdim=True))
    base = torch.where(raised == -math.inf, 0.0, raised)
    before, weights = (largest - base).exp(), (scores - base).exp()
    # A unit of each key goes to the weights: so hidden keys decide nothing about the rounding of a row.
    unit = row_units(v)
    scaled = weights.to(v.dtype).double() * unit.mT
    row_unit = row_units(scaled)
    added = unit_products(scaled / row_unit, (v.double() / unit).mT) * row_unit
    return raised, weight * before + ordered_sum(weights), sums * before + added.to(sums.dtype)


def _merged(total: _State, part: _State) -> _State:
    raised = torch.maximum(total[0], part[0])
    base = torch.where(raised == -math.inf, 0.0, raised)
    a, b = (total[0] - base).exp(), (part[0] - base).exp()
    return raised, total[1] * a + part[1] * b, total[2] * a + part[2] * b


def exact_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    scale: float,
    window: int = 0,
    places: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``q``, ``k`` and ``v`` (Dao 2023, FlashAttention-2, algorithm 2); its sums have no fixed order.

    Args:
        grad: of the result, ``[B, T, Hq, D]``.
        q, k, v, scale, window, places: of :func:`exact_attention`.
        out: its first result.
        logsumexp: its second result.

    Returns:
        In the dtypes and layouts of ``q``, ``k`` and ``v``.
    """
    check_attention(q, k, v, places, scale, window)
    dtype, (b, hq, t, d), (_, hkv, s, _) = wide(q.dtype), q.shape, k.shape
    first, query = _places(q, k, places)
    rows = (query[:, None] + torch.arange(t, device=q.device)).view(b, 1, 1, t, 1)
    keys, grouped = torch.arange(s, device=q.device), (b, hkv, hq // hkv, t)
    seen = (keys >= first.view(b, 1, 1, 1, 1)) & (keys <= rows)
    if window:
        seen = seen & (keys > rows - window)
    queries, keys_, values = q.to(dtype).reshape(*grouped, d), k.to(dtype).unsqueeze(2), v.to(dtype).unsqueeze(2)
    grads = grad.to(dtype).transpose(1, 2).reshape(*grouped, d)
    delta = (grads * out.to(dtype).transpose(1, 2).reshape(*grouped, d)).sum(-1, keepdim=True)
    scores = queries @ keys_.mT * scale
    weights = torch.where(seen, (scores - logsumexp.to(dtype).reshape(*grouped, 1)).exp(), 0.0)
    of_scores = weights * (grads @ values.mT - delta) * scale
    of_q = (of_scores @ keys_).reshape(q.shape)
    of_k = (of_scores.mT @ queries).sum(2)
    of_v = (weights.mT @ grads).sum(2)
    return _like(of_q, q), _like(of_k, k), _like(of_v, v)


def _like(values: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(values)


def check_attention(q: Any, k: Any, v: Any, places: Any, scale: float, window: int) -> None:
    """Check the arguments of :func:`exact_attention`, tensors or views.

    Raises:
        ValueError: shapes, dtypes, ``scale`` or ``window`` do not fit.
    """
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if not _are_heads(*shapes):
        raise ValueError(
            "exact_attention needs q [B, Hq, T, D], and k and v [B, Hkv, S, D] with Hq a multiple of Hkv; got shapes "
            f"{', '.join(map(str, shapes))}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype; got {q.dtype}, {k.dtype} and {v.dtype}: cast two of them")
    if not scale > 0:
        raise ValueError(f"scale must be above 0; got {scale}: change the sign of q")
    if window < 0:
        raise ValueError(f"window must be a number of keys, or 0 for all; got {window}")
    if places is None:
        if shapes[0][2] > shapes[1][2]:
            raise ValueError(
                f"without places the queries are the last keys; got {shapes[0][2]} queries and {shapes[1][2]} keys"
            )
    elif tuple(places.shape) != (shapes[0][0], 2) or places.dtype != torch.int32:
        raise ValueError(
            f"places must be int32 of shape {(shapes[0][0], 2)}: the index of the first key and of the first query of "
            f"each sequence; got {places.dtype} of shape {tuple(places.shape)}"
        )


def _are_heads(q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> bool:
    is_like = len(q) == len(k) == 4 and k == v and (q[0], q[3]) == (k[0], k[3])
    return is_like and k[1] > 0 and q[1] % k[1] == 0
