"""The gradient of attention (Dao 2023, FlashAttention-2): the sums of rows, then queries, then keys and values.

Bits of a gradient need no order of their own. A tile has the rows that a tile of ``attention_kernel`` has.
"""

import triton
import triton.language as tl

from tritonfp8.kernels.exact.attention import Heads, load_keys, seen, sequence_of, span_of
from tritonfp8.kernels.numerics import LOG2_E
from tritonfp8.kernels.pdl import begin


@triton.jit
def attention_delta_kernel(
    grad_ptr, out_ptr, delta_ptr, T, heads, rows, stride_gb, stride_gt, stride_gh,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``delta [B, H, T]``: the sum of ``grad * out`` of each row; both ``[B, T, H, D]``."""
    begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)[None, :]
    head, token, batch = row % heads, row // heads % T, row // heads // T
    mask = (row < rows)[:, None] & (cols < D)
    offsets = batch.to(tl.int64) * stride_gb + token.to(tl.int64) * stride_gt + head.to(tl.int64) * stride_gh
    grad = tl.load(grad_ptr + offsets[:, None] + cols, mask=mask, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + row[:, None] * D + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(delta_ptr + (batch * heads + head) * T + token, tl.sum(grad * out, 1), mask=row < rows)


@triton.jit
def _weights(scores, logsumexp, mask, SCALE: tl.constexpr):
    """The weights of keys from products; 0 where ``mask`` hides them."""
    return tl.where(mask, tl.exp2(scores * (SCALE * LOG2_E) - logsumexp * LOG2_E), 0.0)


@triton.jit
def attention_query_grad_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, logsumexp_ptr, delta_ptr, places_ptr, out_ptr, heads, kv_heads, T, S, window,
    stride_gb, stride_gt, stride_gh, stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_ob, stride_oh, stride_ot,
    SCALE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PLACES: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``out``, the gradient of ``q``; a program has a tile of rows and walks over the keys that they see."""
    begin(DEPENDENT)
    tile = tl.cdiv(T * GROUP, BLOCK_M) - 1 - tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    batch, kv_head = (head // kv_heads).to(tl.int64), (head % kv_heads).to(tl.int64)
    sequence = sequence_of(places_ptr, batch, T, S, window, PLACES)
    span = span_of(sequence, tile * BLOCK_M, GROUP, BLOCK_M, WINDOW)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)[None, :]
    token, q_head = (rows // GROUP).to(tl.int64), kv_head * GROUP + rows % GROUP
    exists = rows < T * GROUP
    mask = exists[:, None] & (cols < D)
    places = batch.to(tl.int64) * stride_qb + q_head.to(tl.int64) * stride_qh + token.to(tl.int64) * stride_qt
    q = tl.load(q_ptr + places[:, None] + cols, mask=mask, other=0.0)
    places = batch.to(tl.int64) * stride_gb + q_head.to(tl.int64) * stride_gh + token.to(tl.int64) * stride_gt
    grad = tl.load(grad_ptr + places[:, None] + cols, mask=mask, other=0.0).to(q.dtype)
    place = (batch * kv_heads * GROUP + q_head) * T + token
    logsumexp = tl.load(logsumexp_ptr + place, mask=exists, other=0.0)[:, None]
    delta = tl.load(delta_ptr + place, mask=exists, other=0.0)[:, None]
    at = (sequence.query + token)[:, None]
    keys_of = Heads(k_ptr + batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh, 0, 0, stride_ks)
    values_of = Heads(v_ptr + batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh, 0, 0, stride_vs)
    out = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for key in tl.range(span.start, span.end, BLOCK_N):
        keys = load_keys(keys_of, key, span.end, BLOCK_N, D, BLOCK_D, False)
        values = load_keys(values_of, key, span.end, BLOCK_N, D, BLOCK_D, False)
        visible = seen(at, (key + tl.arange(0, BLOCK_N))[None, :], sequence, WINDOW)
        weights = _weights(tl.dot(q, keys.T, input_precision=PRECISION), logsumexp, visible, SCALE)
        of_scores = weights * (tl.dot(grad, values.T, input_precision=PRECISION) - delta)
        out = tl.dot(of_scores.to(keys.dtype), keys, out, input_precision=PRECISION)
    places = batch.to(tl.int64) * stride_ob + q_head.to(tl.int64) * stride_oh + token.to(tl.int64) * stride_ot
    tl.store(out_ptr + places[:, None] + cols, (out * SCALE).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def attention_key_grad_kernel(
    grad_ptr, q_ptr, k_ptr, v_ptr, logsumexp_ptr, delta_ptr, places_ptr, of_k_ptr, of_v_ptr, heads, kv_heads,
    T, S, window, stride_gb, stride_gt, stride_gh, stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks,
    stride_vb, stride_vh, stride_vs, stride_okb, stride_okh, stride_oks, stride_ovb, stride_ovh, stride_ovs,
    SCALE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PLACES: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The gradients of ``k`` and ``v``; a program has a tile of keys and walks over the rows that see them."""
    begin(DEPENDENT)
    head = tl.program_id(0) % heads
    key = tl.program_id(0) // heads * BLOCK_N
    batch, kv_head = (head // kv_heads).to(tl.int64), (head % kv_heads).to(tl.int64)
    sequence = sequence_of(places_ptr, batch, T, S, window, PLACES)
    cols = tl.arange(0, BLOCK_D)[None, :]
    keys_of = Heads(k_ptr + batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh, 0, 0, stride_ks)
    values_of = Heads(v_ptr + batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh, 0, 0, stride_vs)
    keys = load_keys(keys_of, key, S, BLOCK_N, D, BLOCK_D, False)
    values = load_keys(values_of, key, S, BLOCK_N, D, BLOCK_D, False)
    index = key + tl.arange(0, BLOCK_N)
    of_k = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    of_v = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    first = tl.maximum(key - sequence.query, 0) * GROUP
    # Keys before the sequence have no row.
    last = tl.where(key + BLOCK_N > sequence.first, T * GROUP, 0)
    if WINDOW:
        last = tl.minimum(last, (key + BLOCK_N - 1 - sequence.query + window) * GROUP)
    for row in tl.range(first, last, BLOCK_M):
        rows = row + tl.arange(0, BLOCK_M)
        token, q_head = (rows // GROUP).to(tl.int64), kv_head * GROUP + rows % GROUP
        exists = rows < T * GROUP
        mask = exists[:, None] & (cols < D)
        places = batch.to(tl.int64) * stride_qb + q_head.to(tl.int64) * stride_qh + token.to(tl.int64) * stride_qt
        q = tl.load(q_ptr + places[:, None] + cols, mask=mask, other=0.0)
        places = batch.to(tl.int64) * stride_gb + q_head.to(tl.int64) * stride_gh + token.to(tl.int64) * stride_gt
        grad = tl.load(grad_ptr + places[:, None] + cols, mask=mask, other=0.0).to(q.dtype)
        place = (batch * kv_heads * GROUP + q_head) * T + token
        logsumexp = tl.load(logsumexp_ptr + place, mask=exists, other=0.0)[None, :]
        delta = tl.load(delta_ptr + place, mask=exists, other=0.0)[None, :]
        visible = seen((sequence.query + token)[None, :], index[:, None], sequence, WINDOW) & exists[None, :]
        weights = _weights(tl.dot(keys, q.T, input_precision=PRECISION), logsumexp, visible, SCALE)
        of_v = tl.dot(weights.to(grad.dtype), grad, of_v, input_precision=PRECISION)
        of_scores = weights * (tl.dot(values, grad.T, input_precision=PRECISION) - delta)
        of_k = tl.dot(of_scores.to(q.dtype), q, of_k, input_precision=PRECISION)
    mask = (index < S)[:, None] & (cols < D)
    places = batch.to(tl.int64) * stride_okb + kv_head.to(tl.int64) * stride_okh + index.to(tl.int64) * stride_oks
    tl.store(of_k_ptr + places[:, None] + cols, (of_k * SCALE).to(of_k_ptr.dtype.element_ty), mask=mask)
    places = batch.to(tl.int64) * stride_ovb + kv_head.to(tl.int64) * stride_ovh + index.to(tl.int64) * stride_ovs
    tl.store(of_v_ptr + places[:, None] + cols, of_v.to(of_v_ptr.dtype.element_ty), mask=mask)
