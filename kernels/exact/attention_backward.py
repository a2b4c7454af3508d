"""The gradient of attention (Dao 2023, FlashAttention-2, algorithm 2), in three kernels."""

import triton
import triton.language as tl

from tritonfp8.kernels.exact.attention import Keys, load_rows, sequence_bounds
from tritonfp8.kernels.exact.rows import finite_base
from tritonfp8.kernels.numerics import LOG2_E
from tritonfp8.kernels.pdl import begin


@triton.jit
def row_dots_kernel(
    grad_ptr, out_ptr, dots_ptr, rows, heads, T, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``dots [B, heads, T]``: sums of ``grad * out`` over D, of ``[B, T, heads, D]``."""
    begin(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    places = row[:, None] * D + dims[None, :]
    mask = (row < rows)[:, None] & (dims < D)[None, :]
    grad = tl.load(grad_ptr + places, mask=mask, other=0.0).to(tl.float32)
    dots = tl.sum(grad * tl.load(out_ptr + places, mask=mask, other=0.0).to(tl.float32), 1)
    batch, token, head = row // heads // T, row // heads % T, row % heads
    tl.store(dots_ptr + (batch * heads + head) * T + token, dots, mask=row < rows)


@triton.jit
def head_of(pointer, batch, head, stride_batch, stride_head):
    """The address of one head of one sequence."""
    return pointer + batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head


@triton.jit
def weights_of(scores, logsumexp, position, index, first, size, WINDOW: tl.constexpr):
    """Weights of keys at ``index`` by rows at ``position``, along the rows or the columns of ``scores``."""
    seen = (index <= position) & (index >= first) & (index >= 0) & (index < size)
    if WINDOW > 0:
        seen = seen & (index > position - WINDOW)
    return tl.where(seen, tl.exp2(scores - finite_base(logsumexp) * LOG2_E), 0.0)


@triton.jit
def query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, places_ptr, grad_ptr, logsumexp_ptr, dots_ptr, of_q_ptr, heads, T, S, D, tiles,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_ot, SCALE: tl.constexpr, FACTOR: tl.constexpr,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, HAS_PLACES: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The gradient of ``q [B, heads, T, D]``; a program has BLOCK queries of a head."""
    begin(DEPENDENT)
    head = (tl.program_id(0) % heads).to(tl.int64)
    tile = tiles - 1 - (tl.program_id(0) // heads) % tiles
    batch = (tl.program_id(0) // heads // tiles).to(tl.int64)
    first, query = sequence_bounds(places_ptr, batch, S, T, HAS_PLACES)
    token = tile * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, BLOCK_D)
    is_row = token < T
    mask = is_row[:, None] & (dims < D)[None, :]
    wide = token.to(tl.int64)
    q = tl.load(
        (head_of(q_ptr, batch, head, stride_qb, stride_qh) + wide.to(tl.int64) * stride_qt)[:, None] + dims[None, :],
        mask=mask,
        other=0.0,
    )
    grad = tl.load(grad_ptr + ((batch * T + wide) * heads + head)[:, None] * D + dims[None, :], mask=mask, other=0.0)
    figures = (batch * heads + head) * T + wide
    logsumexp = tl.load(logsumexp_ptr + figures, mask=is_row, other=0.0)
    dots = tl.load(dots_ptr + figures, mask=is_row, other=0.0)
    keys = Keys(head_of(k_ptr, batch, head // GROUP, stride_kb, stride_kh), stride_ks, S)
    values = Keys(head_of(v_ptr, batch, head // GROUP, stride_vb, stride_vh), stride_vs, S)
    position = query + token
    start = tl.maximum(first, 0)
    if WINDOW > 0:
        start = tl.maximum(start, query + tile * BLOCK - WINDOW + 1)
    end = tl.minimum(query + tl.minimum(tile * BLOCK + BLOCK, T), S)
    total = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for at in tl.range(start, end, BLOCK, num_stages=STAGES):
        index = at + tl.arange(0, BLOCK)
        k = load_rows(keys, index, D, BLOCK_D, True)
        v = load_rows(values, index, D, BLOCK_D, True)
        scores = tl.dot(q, k.T, input_precision=PRECISION) * FACTOR
        weights = weights_of(scores, logsumexp[:, None], position[:, None], index[None, :], first, S, WINDOW)
        of_scores = weights * (tl.dot(grad, v.T, input_precision=PRECISION) - dots[:, None])
        total = tl.dot(of_scores.to(k.dtype), k, total, input_precision=PRECISION)
    out = (head_of(of_q_ptr, batch, head, stride_ob, stride_oh) + wide.to(tl.int64) * stride_ot)[:, None] + dims[
        None, :
    ]
    tl.store(out, (total * SCALE).to(of_q_ptr.dtype.element_ty), mask=mask)


@triton.jit
def key_gradients_kernel(
    q_ptr, k_ptr, v_ptr, places_ptr, grad_ptr, logsumexp_ptr, dots_ptr, of_k_ptr, of_v_ptr, heads, T, S, D, tiles,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_os, stride_pb, stride_ph, stride_ps, SCALE: tl.constexpr, FACTOR: tl.constexpr,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, HAS_PLACES: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values ``[B, heads / GROUP, S, D]``; a program has BLOCK keys of GROUP heads."""
    begin(DEPENDENT)
    of_heads = heads // GROUP
    pair = (tl.program_id(0) % of_heads).to(tl.int64)
    tile = (tl.program_id(0) // of_heads) % tiles
    batch = (tl.program_id(0) // of_heads // tiles).to(tl.int64)
    first, query = sequence_bounds(places_ptr, batch, S, T, HAS_PLACES)
    index = tile * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, BLOCK_D)
    mask = (index < S)[:, None] & (dims < D)[None, :]
    k = load_rows(Keys(head_of(k_ptr, batch, pair, stride_kb, stride_kh), stride_ks, S), index, D, BLOCK_D, True)
    v = load_rows(Keys(head_of(v_ptr, batch, pair, stride_vb, stride_vh), stride_vs, S), index, D, BLOCK_D, True)
    start = tl.maximum(tile * BLOCK - query, 0)
    end = T
    if WINDOW > 0:
        end = tl.minimum(end, tile * BLOCK + BLOCK - 1 + WINDOW - query)
    of_k = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    of_v = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    for i in range(GROUP):
        head = pair * GROUP + i
        of_head = Keys(head_of(q_ptr, batch, head, stride_qb, stride_qh), stride_qt, T)
        grads = Keys(grad_ptr + (batch * T * heads + head) * D, heads * D, T)
        for at in tl.range(start, end, BLOCK, num_stages=STAGES):
            token = at + tl.arange(0, BLOCK)
            q = load_rows(of_head, token, D, BLOCK_D, True)
            grad = load_rows(grads, token, D, BLOCK_D, True)
            figures = (batch * heads + head) * T + token
            logsumexp = tl.load(logsumexp_ptr + figures, mask=token < T, other=0.0)
            dots = tl.load(dots_ptr + figures, mask=token < T, other=0.0)
            scores = tl.dot(k, q.T, input_precision=PRECISION) * FACTOR
            weights = weights_of(scores, logsumexp[None, :], query + token[None, :], index[:, None], first, S, WINDOW)
            of_v = tl.dot(weights.to(grad.dtype), grad, of_v, input_precision=PRECISION)
            of_scores = weights * (tl.dot(v, grad.T, input_precision=PRECISION) - dots[None, :])
            of_k = tl.dot(of_scores.to(q.dtype), q, of_k, input_precision=PRECISION)
    wide = index.to(tl.int64)
    out = (head_of(of_k_ptr, batch, pair, stride_ob, stride_oh) + wide.to(tl.int64) * stride_os)[:, None] + dims[
        None, :
    ]
    tl.store(out, (of_k * SCALE).to(of_k_ptr.dtype.element_ty), mask=mask)
    out = (head_of(of_v_ptr, batch, pair, stride_pb, stride_ph) + wide.to(tl.int64) * stride_ps)[:, None] + dims[
        None, :
    ]
    tl.store(out, of_v.to(of_v_ptr.dtype.element_ty), mask=mask)
