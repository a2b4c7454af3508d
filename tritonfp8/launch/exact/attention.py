"""Launch attention whose rows have bits of their own, whole or in parts, and its gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tritonfp8 import reference
from tritonfp8.compat import torch_private
from tritonfp8.kernels.exact import attention as kernels
from tritonfp8.kernels.exact import attention_backward as backward_kernels
from tritonfp8.launch.exact.rows import OPTIONS
from tritonfp8.launch.launcher import launcher
from tritonfp8.launch.plan import MAX_TMA_STRIDE, TMA_ALIGNMENT, Planner, Pointer, TensorMap, View

_ON_KERNELS = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST_HEAD, _DELTA_ROWS = 256, 16


class AttentionTile(NamedTuple):
    """Rows of a tile and its warps. Tiles of 64 rows and 4 warps, and 128 and 8, give a row the same bits."""

    rows: int
    num_warps: int
    num_stages: int


def _tile(rows: int, d: int, dtype: torch.dtype) -> AttentionTile:
    """One for all numbers of rows where the layout of a tile decides the order of its sums."""
    if dtype == torch.float32:
        # Without tensor cores a thread has an element of few rows: more spill.
        return AttentionTile(16, 8, 1)
    if d > 128:
        return AttentionTile(64, 8, 2)
    return AttentionTile(64, 4, 2) if rows <= 64 else AttentionTile(128, 8, 2)


def _has_rows(*heads: View) -> bool:
    """Whether kernels read these: elements of a row follow each other."""
    return all(x.strides[3] == 1 or x.shape[3] == 1 for x in heads)


def _has_tma_layout(x: View) -> bool:
    strides = [stride * x.itemsize for stride in x.strides[:3]]
    return x.aligned and x.strides[3] == 1 and all(0 < s < MAX_TMA_STRIDE and s % TMA_ALIGNMENT == 0 for s in strides)


def _precision(x: View) -> str | None:
    return "ieee" if x.dtype == torch.float32 else None


def _slots(t: int, s: int, window: int) -> int:
    """The most splits that one tile of queries sees; a window or a dropped key may begin in the middle of one."""
    keys = min(s, window + t - 1) if window else s
    return (keys + kernels.SPLIT.value - 2) // kernels.SPLIT.value + 1


def plan_exact_attention(
    plan: Planner, q: View, k: View, v: View, places: View | None, scale: float, window: int
) -> list[View] | None:
    """Two outputs, ``[B, T, Hq, D]`` and ``[B, Hq, T]``."""
    return plan_tiles(plan, q, k, v, places, scale, window)


def plan_tiles(
    plan: Planner,
    q: View,
    k: View,
    v: View,
    places: View | None,
    scale: float,
    window: int,
    tile: AttentionTile | None = None,
    in_parts: bool | None = None,
    tma: bool | None = None,
) -> list[View] | None:
    """:func:`plan_exact_attention`; ``tile``, ``in_parts`` and ``tma`` replace what would be chosen."""
    reference.check_attention(q, k, v, places, scale, window)
    (b, hq, t, d), (_, hkv, s, _) = q.shape, k.shape
    if not (q.numel() and k.numel()) or q.dtype not in _ON_KERNELS or d > _WIDEST_HEAD or not _has_rows(q, k, v):
        return None
    if places is not None and not places.is_contiguous():
        return None
    group, heads = hq // hkv, b * hkv
    rows, slots = t * group, _slots(t, s, window)
    tile = tile or _tile(rows, d, q.dtype)
    in_parts = rows <= tile.rows and (slots > 1 if in_parts is None else in_parts)
    # A cache may have anything behind its last query: pointers leave that out.
    tma = (plan.device.has_tma if tma is None else tma) and places is None and all(map(_has_tma_layout, (k, v)))
    out, logsumexp = plan.empty((b, t, hq, d), q.dtype), plan.empty((b, hq, t), torch.float32)
    block_d = max(16, triton.next_power_of_2(d))
    keys: list[Pointer] = [k, v]
    if tma:
        keys = [TensorMap(x, (1, 1, kernels.STEP.value, block_d)) for x in (k, v)]
    shared = {"SCALE": scale, "GROUP": group, "D": d, "BLOCK_D": block_d, "BLOCK_M": tile.rows}
    flags = {"PLACES": places is not None, "WINDOW": window > 0}
    targets: tuple[View | None, ...] = (out, logsumexp, None)
    if in_parts:
        state = (heads, slots, rows)
        targets = (plan.empty((*state, d), torch.float32), *(plan.empty(state, torch.float32) for _ in range(2)))
    plan.launch(
        kernels.attention_kernel,
        heads * (slots if in_parts else -(-rows // tile.rows)),
        (q, *keys, places, *targets),
        (heads, hkv, t, s, window, slots if in_parts else 1, *q.strides[:3], *k.strides[:3], *v.strides[:3]),
        {**shared, "PARTS": in_parts, **flags, "TMA": tma, "PRECISION": _precision(q)},
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **OPTIONS,
    )
    if in_parts:
        plan.launch(
            kernels.merge_parts_kernel,
            heads * rows,
            (*targets, places, out, logsumexp),
            (hkv, t, s, window, slots),
            {**shared, "ROWS": 1, **flags},
            num_warps=1,
            **OPTIONS,
        )
    return [out, logsumexp]


exact_attention = launcher(plan_exact_attention, reference.exact_attention)


def plan_exact_attention_backward(
    plan: Planner,
    grad: View,
    q: View,
    k: View,
    v: View,
    out: View,
    logsumexp: View,
    places: View | None,
    scale: float,
    window: int,
) -> list[View] | None:
    """Three outputs, in the layouts of ``q``, ``k`` and ``v``."""
    reference.check_attention(q, k, v, places, scale, window)
    (b, hq, t, d), (_, hkv, s, _) = q.shape, k.shape
    if not (q.numel() and k.numel()) or q.dtype not in _ON_KERNELS or d > _WIDEST_HEAD:
        return None
    contiguous = [x for x in (out, logsumexp, places) if x is not None]
    if not (_has_rows(grad, q, k, v) and all(x.is_contiguous() for x in contiguous)):
        return None
    of_q, of_k, of_v = (plan.like(torch.empty_like(_layout(x))) for x in (q, k, v))
    delta = plan.empty((b, hq, t), torch.float32)
    block_d, heads, group = max(16, triton.next_power_of_2(d)), b * hkv, hq // hkv
    plan.launch(
        backward_kernels.attention_delta_kernel,
        -(-b * t * hq // _DELTA_ROWS),
        (grad, out, delta),
        (t, hq, b * t * hq, *grad.strides[:3]),
        {"D": d, "BLOCK_D": block_d, "ROWS": _DELTA_ROWS},
        num_warps=4,
    )
    is_wide = q.dtype == torch.float32
    block = 32 if is_wide else 64
    constants = {
        "SCALE": scale, "GROUP": group, "D": d, "BLOCK_D": block_d, "BLOCK_M": block, "BLOCK_N": block,
        "PLACES": places is not None, "WINDOW": window > 0, "PRECISION": _precision(q),
    }  # fmt: skip
    options = {"num_warps": 8 if d > 64 else 4, "num_stages": 1 if is_wide or d > 128 else 2}
    sizes = (heads, hkv, t, s, window)
    strides = [stride for x in (grad, q, k, v) for stride in x.strides[:3]]
    tensors = (grad, q, k, v, logsumexp, delta, places)
    plan.launch(
        backward_kernels.attention_query_grad_kernel,
        heads * -(-t * group // block),
        (*tensors, of_q),
        (*sizes, *strides, *of_q.strides[:3]),
        constants,
        **options,
    )
    plan.launch(
        backward_kernels.attention_key_grad_kernel,
        heads * -(-s // block),
        (*tensors, of_k, of_v),
        (*sizes, *strides, *of_k.strides[:3], *of_v.strides[:3]),
        constants,
        **options,
    )
    return [of_q, of_k, of_v]


def _layout(x: View) -> Tensor:
    return torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device="meta")


_by_kernels = launcher(plan_exact_attention_backward, reference.exact_attention_backward)


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
    """Launch the twin of :func:`tritonfp8.reference.exact_attention_backward`.

    cuDNN serves plain causal attention, where its gradient is not wanted to be deterministic: its kernels are faster.
    """
    if places is None and _serves_cudnn(q, k, window):
        return by_cudnn(grad, q, k, v, out, logsumexp, scale)
    found: tuple[Tensor, Tensor, Tensor] = _by_kernels(grad, q, k, v, out, logsumexp, scale, window, places)
    return found


def _serves_cudnn(q: Tensor, k: Tensor, window: int) -> bool:
    return (
        torch_private.cudnn_attention_backward is not None
        and window == 0
        and q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] == k.shape[2] > 1
        and q.numel() > 0
        and q.shape[3] % 8 == 0
        and q.shape[3] <= 128
        and not torch.are_deterministic_algorithms_enabled()
    )


def by_cudnn(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of causal attention by cuDNN, of T queries and T keys; see :func:`exact_attention_backward`."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x if group == 1 else x.repeat_interleave(group, 1) for x in (k, v))
    backward = torch_private.cudnn_attention_backward
    assert backward is not None
    grads = backward(grad.transpose(1, 2), q, keys, values, out.transpose(1, 2), logsumexp, scale)
    of_q, of_k, of_v = grads
    if group > 1:
        of_k, of_v = (x.unflatten(1, (-1, group)).sum(2, dtype=torch.float32) for x in (of_k, of_v))
    return _like(of_q, q), _like(of_k, k), _like(of_v, v)


def _like(values: Tensor, x: Tensor) -> Tensor:
    """``values`` in the dtype and the layout that a fake tensor says."""
    wanted = torch.empty_like(x)
    return values if values.dtype == x.dtype and values.stride() == wanted.stride() else wanted.copy_(values)
