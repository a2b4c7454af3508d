"""Causal attention whose rows have bits of their own: keys in splits, each summed by itself, then merged in order.

    keys     |<- split: STEPS * STEP keys ->|<- split ->| ...
    steps    | STEP | STEP | ...          |   online softmax, from an empty state in each split
    state    ------------------> merge ------------------> merge ...

``attention_kernel`` has a tile of queries and all of its splits, or with PARTS one split, which
``merge_parts_kernel`` merges by the same function. Keys, steps and splits that a row does not see change none of its
bits, so both give the same ones. Neither may be compiled with fusion of multiplications and additions.
"""

from collections import namedtuple

import triton
import triton.language as tl

from tritonfp8.kernels.exact.rows import LN_2, finite_base
from tritonfp8.kernels.pdl import begin

# Keys or values of one head. ``size`` is the number of keys.
Keys = namedtuple("Keys", "pointer stride size")
# Of each row of a tile: the largest score, the sum of weights, and the weighted sum of values ``[rows, BLOCK_D]``.
State = namedtuple("State", "largest weight sums")


@triton.jit
def load_rows(source, index, D, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """``[rows, BLOCK_D]`` of keys at ``index``; with MASKED zeros for keys that do not exist."""
    dims = tl.arange(0, BLOCK_D)
    places = source.pointer + index.to(tl.int64)[:, None] * source.stride + dims[None, :]
    if MASKED:
        exists = (index >= 0) & (index < source.size)
        return tl.load(places, mask=exists[:, None] & (dims < D)[None, :], other=0.0)
    return tl.load(places, mask=(dims < D)[None, :], other=0.0) if BLOCK_D != D else tl.load(places)


@triton.jit
def empty_state(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Without keys."""
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    return State(largest, tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M, BLOCK_D), tl.float32))


@triton.jit
def merge(total, part):
    """The state of some splits and the state of the next one, as one."""
    raised = tl.maximum(total.largest, part.largest)
    base = finite_base(raised)
    a, b = tl.exp2(total.largest - base), tl.exp2(part.largest - base)
    weight = tl.fma(total.weight, a, part.weight * b)
    sums = tl.fma(total.sums, tl.broadcast_to(a[:, None], total.sums.shape), part.sums * b[:, None])
    return State(raised, weight, sums)


@triton.jit
def attend(
    q, keys, values, position, index, state, D,
    FACTOR: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """A state after the step of the keys at ``index``, by the online softmax; ``position`` is of each row's own key."""
    BLOCK_D: tl.constexpr = q.shape[1]
    k = load_rows(keys, index, D, BLOCK_D, MASKED)
    scores = tl.dot(q, k.T, input_precision=PRECISION) * FACTOR
    if MASKED:
        seen = (index[None, :] <= position[:, None]) & (index >= 0)[None, :]
        if WINDOW > 0:
            seen = seen & (index[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    raised = tl.maximum(state.largest, tl.max(scores, 1))
    base = finite_base(raised)
    weights = tl.exp2(scores - base[:, None])
    before = tl.exp2(state.largest - base)
    weight = tl.fma(state.weight, before, tl.sum(weights, 1))
    v = load_rows(values, index, D, BLOCK_D, MASKED)
    sums = tl.dot(weights.to(v.dtype), v, state.sums * before[:, None], input_precision=PRECISION)
    return State(raised, weight, sums)


@triton.jit
def finish(state):
    """The result of a state, and its logsumexp; 0 and -inf without keys."""
    none = state.weight == 0.0
    safe = tl.where(none, 1.0, state.weight)
    out = tl.div_rn(state.sums, tl.broadcast_to(safe[:, None], state.sums.shape))
    return tl.where(none[:, None], 0.0, out), tl.where(none, float("-inf"), (state.largest + tl.log2(safe)) * LN_2)


@triton.jit
def sequence_bounds(places_ptr, batch, S, T, HAS_PLACES: tl.constexpr):
    """The index among the keys of a sequence's first token, and of its first query."""
    if HAS_PLACES:
        return tl.load(places_ptr + 2 * batch), tl.load(places_ptr + 2 * batch + 1)
    else:
        return 0, S - T


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, places_ptr, out_ptr, logsumexp_ptr, largest_ptr, weight_ptr, sums_ptr,
    heads, T, S, D, tiles, parts,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    FACTOR: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, WINDOW: tl.constexpr, HAS_PLACES: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    STEP: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``out [B, T, heads, D]`` and ``logsumexp [B, heads, T]`` of ``q [B, heads, T, D]`` and S keys of a head.

    The rows of a tile are T queries of PACK heads, 1 or GROUP, that share keys. With PARTS a program has one split, and
    writes its state, float32: ``sums [B, heads / PACK, parts, T * PACK, D]`` and the others without D.
    """
    begin(DEPENDENT)
    # Long tiles first: the last ones of a causal mask have most keys.
    program = tl.program_id(0)
    part = program % parts
    program = program // parts
    of_heads = heads // PACK
    pair = program % of_heads
    tile = tiles - 1 - (program // of_heads) % tiles
    batch = (program // of_heads // tiles).to(tl.int64)
    first, query = sequence_bounds(places_ptr, batch, S, T, HAS_PLACES)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = rows // PACK, pair * PACK + rows % PACK
    is_row = token < T
    dims = tl.arange(0, BLOCK_D)
    in_tile = is_row[:, None] & (dims < D)[None, :]
    own_rows = q_ptr + batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh + token.to(tl.int64) * stride_qt
    q = tl.load(own_rows[:, None] + dims[None, :], mask=in_tile, other=0.0)
    position = query + token
    lowest = query + tile * BLOCK_M // PACK
    highest = tl.minimum(query + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // PACK, T - 1), S - 1)
    # A cache may have anything behind the last query, also NaN.
    of_keys = pair * PACK // GROUP
    keys = Keys(k_ptr + batch.to(tl.int64) * stride_kb + of_keys.to(tl.int64) * stride_kh, stride_ks, highest + 1)
    values = Keys(v_ptr + batch.to(tl.int64) * stride_vb + of_keys.to(tl.int64) * stride_vh, stride_vs, highest + 1)
    # Steps of keys, counted from the first token: all that a row of the tile sees.
    begins = tl.maximum(first, 0)
    if WINDOW > 0:
        begins = tl.maximum(begins, lowest - WINDOW + 1)
    start = (begins - first) // STEP
    end = tl.maximum((highest - first) // STEP + 1, 0)
    if PARTS:
        split = (tl.maximum(first, 0) - first) // (STEP * STEPS) + part
        start = tl.maximum(start, split * STEPS)
        end = tl.minimum(end, split * STEPS + STEPS)
    total = empty_state(BLOCK_M, BLOCK_D)
    state = empty_state(BLOCK_M, BLOCK_D)
    whole = start
    if not PARTS and WINDOW == 0:
        # Steps that every row of the tile sees whole.
        whole = tl.where(first < 0, start, tl.maximum(tl.minimum((lowest - first + 1) // STEP, end), start))
        for step in tl.range(start, whole, num_stages=STAGES):
            index = first + step * STEP + tl.arange(0, STEP)
            state = attend(q, keys, values, position, index, state, D, FACTOR, WINDOW, PRECISION, False)
            if step % STEPS == STEPS - 1:
                total = merge(total, state)
                state = empty_state(BLOCK_M, BLOCK_D)
    for step in tl.range(whole, end, num_stages=1):
        index = first + step * STEP + tl.arange(0, STEP)
        state = attend(q, keys, values, position, index, state, D, FACTOR, WINDOW, PRECISION, True)
        if not PARTS and step % STEPS == STEPS - 1:
            total = merge(total, state)
            state = empty_state(BLOCK_M, BLOCK_D)
    if PARTS:
        place = ((batch * of_heads + pair) * parts + part) * (T * PACK) + rows
        tl.store(largest_ptr + place, state.largest, mask=is_row)
        tl.store(weight_ptr + place, state.weight, mask=is_row)
        tl.store(sums_ptr + place[:, None] * D + dims[None, :], state.sums, mask=in_tile)
    else:
        # The last split may end early; an empty state changes nothing.
        out, logsumexp = finish(merge(total, state))
        place = (batch * T + token) * heads + head
        tl.store(out_ptr + place[:, None] * D + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=in_tile)
        tl.store(logsumexp_ptr + (batch * heads + head) * T + token, logsumexp, mask=is_row)


@triton.jit
def merge_parts_kernel(
    largest_ptr, weight_ptr, sums_ptr, out_ptr, logsumexp_ptr, heads, T, D, parts, PACK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The results of the states that ``attention_kernel`` wrote; a program has BLOCK_M rows of one group of heads."""
    begin(DEPENDENT)
    count = T * PACK
    tiles = tl.cdiv(count, BLOCK_M)
    group = (tl.program_id(0) // tiles).to(tl.int64)
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    is_row = rows < count
    in_tile = is_row[:, None] & (dims < D)[None, :]
    total = empty_state(BLOCK_M, BLOCK_D)
    for part in range(parts):
        place = (group * parts + part) * count + rows
        largest = tl.load(largest_ptr + place, mask=is_row, other=float("-inf"))
        weight = tl.load(weight_ptr + place, mask=is_row, other=0.0)
        sums = tl.load(sums_ptr + place[:, None] * D + dims[None, :], mask=in_tile, other=0.0)
        total = merge(total, State(largest, weight, sums))
    out, logsumexp = finish(total)
    of_heads = heads // PACK
    batch, head = group // of_heads, group % of_heads * PACK + rows % PACK
    token = rows // PACK
    place = (batch * T + token) * heads + head
    tl.store(out_ptr + place[:, None] * D + dims[None, :], out.to(out_ptr.dtype.element_ty), mask=in_tile)
    tl.store(logsumexp_ptr + (batch * heads + head) * T + token, logsumexp, mask=is_row)
