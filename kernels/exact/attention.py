"""Causal attention whose rows have bits of their own, whole or in parts that a second kernel merges.

    keys        first        first + 256                 first + 512
    split       |     0      |            1              |     2 ...
    step of 64  | a  b  c  d |  a   b   c   d            | a
    row's state   recurrence, fresh in each split
                             merge                       merge

A split has its own maximum, sum of weights and weighted sum of values. Splits are merged in order by :func:`merged`: by
one program that computes all splits of its rows (training, prefill), or by a kernel that reads what a program for each
split has written (decode). Both do the same operations on a row. Steps and splits that a row does not see change none
of its bits, so programs leave them out where no row of a tile sees them.

A tile has rows of all heads that share keys: row ``r`` is token ``r // GROUP`` and head ``r % GROUP`` of the group.
"""

from collections import namedtuple

import triton
import triton.language as tl

from tritonfp8.kernels.exact.rows import LN_2, finite_base
from tritonfp8.kernels.numerics import LOG2_E
from tritonfp8.kernels.pdl import begin

SPLIT: tl.constexpr = tl.constexpr(256)
STEP: tl.constexpr = tl.constexpr(64)

# A sequence: index of its first key, and of the key of the first query; numbers of queries, of keys, and in a window.
Sequence = namedtuple("Sequence", "first query T S window")
# Keys that some row of a tile sees: from the first one to the end, and the first and last split of them.
Span = namedtuple("Span", "start end first_split last_split")
# Rows of a tile: their queries [rows, BLOCK_D], the keys at which they are, and the first and the last of these.
Rows = namedtuple("Rows", "queries at low high")
# What rows have of the keys so far: the maximum, the sum of weights, and the weighted sum of values.
State = namedtuple("State", "largest weight sums")
# Keys or values of a head: a TMA descriptor with its coordinates, or a pointer to the first one.
Heads = namedtuple("Heads", "source batch head stride")


@triton.jit
def sequence_of(places_ptr, batch, T, S, window, PLACES: tl.constexpr):
    """The :class:`Sequence` of a batch index."""
    if PLACES:
        first = tl.load(places_ptr + 2 * batch)
        query = tl.load(places_ptr + 2 * batch + 1)
    else:
        first = tl.zeros((), tl.int32)
        query = first + (S - T)
    return Sequence(first, query, T, S, window)


@triton.jit
def span_of(sequence, row, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, WINDOW: tl.constexpr):
    """The :class:`Span` of the rows from ``row`` on."""
    tokens = tl.minimum(sequence.T, (row + BLOCK_M - 1) // GROUP + 1)
    end = tl.minimum(sequence.query + tokens, sequence.S)
    start = tl.maximum(sequence.first, 0)
    if WINDOW:
        start = tl.maximum(start, sequence.query + row // GROUP - sequence.window + 1)
    first_split = (start - sequence.first) // SPLIT
    last_split = (tl.maximum(end - sequence.first, 0) + SPLIT - 1) // SPLIT
    return Span(start, end, first_split, last_split)


@triton.jit
def seen(at, keys, sequence, WINDOW: tl.constexpr):
    """Whether queries at the indices ``at`` see ``keys``; the two broadcast."""
    mask = (keys <= at) & (keys >= tl.maximum(sequence.first, 0)) & (keys < sequence.S)
    return mask & (keys > at - sequence.window) if WINDOW else mask


@triton.jit
def load_keys(heads, key, end, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TMA: tl.constexpr):
    """Rows ``[ROWS, BLOCK_D]`` of a head from ``key`` on; zeros behind ``end`` and D."""
    if TMA:
        return tl.reshape(heads.source.load([heads.batch, heads.head, key, 0]), (ROWS, BLOCK_D))
    else:
        keys = key + tl.arange(0, ROWS)
        cols = tl.arange(0, BLOCK_D)
        pointers = heads.source + keys.to(tl.int64)[:, None] * heads.stride + cols[None, :]
        mask = ((keys >= 0) & (keys < end))[:, None]
        if D != BLOCK_D:
            mask = mask & (cols < D)[None, :]
        return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def merged(largest, weight, sums, part_largest, part_weight, part_sums, SCALE: tl.constexpr):
    """The state of splits, with one more split merged."""
    raised = tl.maximum(largest, part_largest)
    base = finite_base(raised)
    old = tl.exp2((largest - base) * (SCALE * LOG2_E))
    new = tl.exp2((part_largest - base) * (SCALE * LOG2_E))
    weight = tl.fma(weight, old, part_weight * new)
    return raised, weight, tl.fma(sums, old[:, None], part_sums * new[:, None])


@triton.jit
def finished(largest, weight, sums, SCALE: tl.constexpr):
    """The result and the logsumexp of rows; 0 and -inf without keys."""
    none = weight == 0.0
    known = tl.where(none, 1.0, weight)
    factor = tl.div_rn(tl.full(known.shape, 1.0, tl.float32), known)
    logsumexp = tl.fma(finite_base(largest), tl.full(known.shape, SCALE, tl.float32), tl.log2(known) * LN_2)
    return sums * factor[:, None], tl.where(none, float("-inf"), logsumexp)


@triton.jit
def _step(
    rows, k, v, sequence, span, key, before, WINDOW: tl.constexpr, SCALE: tl.constexpr, D: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The :class:`State` of rows after a step of keys from ``key`` on, as three values."""
    BLOCK_D: tl.constexpr = rows.queries.shape[1]
    keys = load_keys(k, key, span.end, STEP, D, BLOCK_D, TMA)
    scores = tl.dot(rows.queries, keys.T, input_precision=PRECISION)
    hides = (key + STEP - 1 > rows.low) | (key < span.start)
    if WINDOW:
        hides = hides | (key <= rows.high - sequence.window)
    if hides:
        mask = seen(rows.at[:, None], (key + tl.arange(0, STEP))[None, :], sequence, WINDOW)
        scores = tl.where(mask, scores, float("-inf"))
    largest = tl.maximum(before.largest, tl.max(scores, 1))
    base = finite_base(largest)
    old = tl.exp2((before.largest - base) * (SCALE * LOG2_E))
    offset = base * (-SCALE * LOG2_E)
    weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, SCALE * LOG2_E, tl.float32), offset[:, None]))
    weight = tl.fma(before.weight, old, tl.sum(weights, 1))
    values = load_keys(v, key, span.end, STEP, D, BLOCK_D, TMA)
    sums = tl.dot(weights.to(values.dtype), values, before.sums * old[:, None], input_precision=PRECISION)
    return largest, weight, sums


@triton.jit
def _split_state(
    rows, k, v, sequence, span, split, WINDOW: tl.constexpr, SCALE: tl.constexpr, D: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The :class:`State` of rows over the keys of one split, as three values."""
    BLOCK_M: tl.constexpr = rows.queries.shape[0]
    BLOCK_D: tl.constexpr = rows.queries.shape[1]
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    start = sequence.first + split * SPLIT
    skipped = tl.maximum(span.start - start, 0) // STEP * STEP
    for key in tl.range(start + skipped, tl.minimum(start + SPLIT, span.end), STEP):
        state = State(largest, weight, sums)
        largest, weight, sums = _step(rows, k, v, sequence, span, key, state, WINDOW, SCALE, D, TMA, PRECISION)
    return largest, weight, sums


@triton.jit
def attention_kernel(
    q_ptr, k, v, places_ptr, out_ptr, logsumexp_ptr, weight_ptr, heads, kv_heads, T, S, window, slots,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    SCALE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr, PLACES: tl.constexpr, WINDOW: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``out [B, T, Hq, D]`` and ``logsumexp [B, Hq, T]`` of ``q [B, Hq, T, D]``; ``heads`` is B * kv_heads.

    A program has a tile of rows; tiles of the last queries, which see most keys, come first. PARTS: a program has one
    of ``slots`` splits of all T * GROUP <= BLOCK_M rows of a head, and writes its state: the weighted sums to ``out
    [heads, slots, rows, D]``, the maximum and the sum of weights to ``logsumexp`` and ``weight [heads, slots, rows]``.
    """
    begin(DEPENDENT)
    program = tl.program_id(0)
    slot = program % slots
    program = program // slots
    tile = tl.cdiv(T * GROUP, BLOCK_M) - 1 - program // heads
    head = program % heads
    batch, kv_head = head // kv_heads, head % kv_heads
    sequence = sequence_of(places_ptr, batch, T, S, window, PLACES)
    span = span_of(sequence, tile * BLOCK_M, GROUP, BLOCK_M, WINDOW)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.arange(0, BLOCK_D)
    token, q_head = rows // GROUP, kv_head * GROUP + rows % GROUP
    exists = rows < T * GROUP
    mask = exists[:, None] & (cols < D)[None, :]
    if TMA:
        keys = Heads(k, batch, kv_head, 0)
        values = Heads(v, batch, kv_head, 0)
    else:
        keys = Heads(k + batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh, 0, 0, stride_ks)
        values = Heads(v + batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh, 0, 0, stride_vs)
    q_rows = q_ptr + batch.to(tl.int64) * stride_qb
    q_rows += q_head.to(tl.int64)[:, None] * stride_qh + token.to(tl.int64)[:, None] * stride_qt
    q = tl.load(q_rows + cols[None, :], mask=mask, other=0.0)
    at = sequence.query + token
    if PARTS:
        split = span.first_split + slot
        if split < span.last_split:
            of_tile = Rows(q, at, tl.min(at, 0), tl.max(at, 0))
            largest, weight, sums = _split_state(
                of_tile, keys, values, sequence, span, split, WINDOW, SCALE, D, TMA, PRECISION
            )
            place = (head * slots + slot).to(tl.int64) * (T * GROUP) + rows
            tl.store(out_ptr + place[:, None] * D + cols[None, :], sums, mask=mask)
            tl.store(logsumexp_ptr + place, largest, mask=exists)
            tl.store(weight_ptr + place, weight, mask=exists)
    else:
        largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
        sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        part_largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        part_weight = tl.zeros((BLOCK_M,), tl.float32)
        part_sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        low, high = tile * BLOCK_M // GROUP, (tile * BLOCK_M + BLOCK_M - 1) // GROUP
        of_tile = Rows(q, at, sequence.query + low, sequence.query + high)
        begin_key = sequence.first + (span.start - sequence.first) // STEP * STEP
        for key in tl.range(begin_key, span.end, STEP):
            if (key - sequence.first) % SPLIT == 0:
                largest, weight, sums = merged(largest, weight, sums, part_largest, part_weight, part_sums, SCALE)
                part_largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
                part_weight = tl.zeros((BLOCK_M,), tl.float32)
                part_sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            part = State(part_largest, part_weight, part_sums)
            part_largest, part_weight, part_sums = _step(
                of_tile, keys, values, sequence, span, key, part, WINDOW, SCALE, D, TMA, PRECISION
            )
        largest, weight, sums = merged(largest, weight, sums, part_largest, part_weight, part_sums, SCALE)
        out, logsumexp = finished(largest, weight, sums, SCALE)
        _store_rows(out, logsumexp, out_ptr, logsumexp_ptr, batch, q_head, token, T, kv_heads * GROUP, D, mask, exists)


@triton.jit
def _store_rows(out, logsumexp, out_ptr, logsumexp_ptr, batch, head, token, T, q_heads, D: tl.constexpr, mask, exists):
    cols = tl.arange(0, out.shape[1])
    place = (batch.to(tl.int64) * T + token) * q_heads + head
    tl.store(out_ptr + place[:, None] * D + cols[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(logsumexp_ptr + (batch.to(tl.int64) * q_heads + head) * T + token, logsumexp, mask=exists)


@triton.jit
def merge_parts_kernel(
    sums_ptr, largest_ptr, weight_ptr, places_ptr, out_ptr, logsumexp_ptr, kv_heads, T, S, window, slots,
    SCALE: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr, PLACES: tl.constexpr, WINDOW: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The results of ``attention_kernel`` from its PARTS; ROWS rows a program."""
    begin(DEPENDENT)
    tiles = tl.cdiv(T * GROUP, ROWS)
    head = tl.program_id(0) // tiles
    batch, kv_head = head // kv_heads, head % kv_heads
    sequence = sequence_of(places_ptr, batch, T, S, window, PLACES)
    span = span_of(sequence, 0, GROUP, BLOCK_M, WINDOW)
    rows = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)
    exists = rows < T * GROUP
    mask = exists[:, None] & (cols < D)[None, :]
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for slot in tl.range(0, span.last_split - span.first_split):
        place = (head * slots + slot).to(tl.int64) * (T * GROUP) + rows
        part_largest = tl.load(largest_ptr + place, mask=exists, other=float("-inf"))
        part_weight = tl.load(weight_ptr + place, mask=exists, other=0.0)
        part_sums = tl.load(sums_ptr + place[:, None] * D + cols[None, :], mask=mask, other=0.0)
        largest, weight, sums = merged(largest, weight, sums, part_largest, part_weight, part_sums, SCALE)
    out, logsumexp = finished(largest, weight, sums, SCALE)
    q_head = kv_head * GROUP + rows % GROUP
    _store_rows(
        out, logsumexp, out_ptr, logsumexp_ptr, batch, q_head, rows // GROUP, T, kv_heads * GROUP, D, mask, exists
    )
