"""Launch attention whose rows have bits of their own, whole or in parts, and its gradient."""

from __future__ import annotations

from typing import Any

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

assert (kernels.SPLIT.value, kernels.STEP.value) == (reference.SPLIT, reference.SUB_TILE)
_ON_KERNELS = (torch.bfloat16, torch.float16, torch.float32)
_LONGEST, _DELTA_ROWS = 256, 16

# Rows of a tile, and warps. Both give a row the same bits; fewer rows would take another instruction, which sums in
# another order.
_FEW, _MANY = (64, 4), (128, 8)
# One for all numbers of rows: where warps share a row, or without tensor cores, the layout decides the order of sums.
_WIDE_HEAD, _FLOAT32 = (64, 8), (16, 8)


def _tile(plan: Planner, rows: int, q: View, is_ahead: bool) -> tuple[int, int]:
    if q.dtype == torch.float32:
        return _FLOAT32
    # Blackwell moves two states from tensor memory to registers where a split begins.
    if q.shape[3] > (64 if plan.device.has_native_mx else 128):
        return _WIDE_HEAD
    # Two programs with a small tile each fill a multiprocessor of Hopper, where TMA loads keys ahead without registers.
    return _FEW if is_ahead or rows <= _FEW[0] else _MANY


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
    return plan_parts(plan, q, k, v, places, scale, window)


def plan_parts(
    plan: Planner,
    q: View,
    k: View,
    v: View,
    places: View | None,
    scale: float,
    window: int,
    parts: bool | None = None,
    tile: tuple[int, int] | None = None,
    tma: bool | None = None,
) -> list[View] | None:
    """:func:`plan_exact_attention`; ``parts``, ``tile`` (rows, warps) and ``tma`` replace what would be chosen."""
    reference.check_attention(q, k, v, places, scale, window)
    (b, hq, t, d), (_, hkv, s, _) = q.shape, k.shape
    if not (q.numel() and k.numel()) or q.dtype not in _ON_KERNELS or d > _LONGEST or not _has_rows(q, k, v):
        return None
    if places is not None and not places.is_contiguous():
        return None
    group, heads = hq // hkv, b * hkv
    rows, slots = t * group, _slots(t, s, window)
    # A cache may have anything behind its last query: pointers leave that out.
    tma = (plan.device.has_tma if tma is None else tma) and places is None and all(map(_has_tma_layout, (k, v)))
    is_ahead = tma and plan.device.has_warpgroup_mma and q.itemsize == 2 and d <= 128
    block_m, warps = tile or _tile(plan, rows, q, is_ahead)
    parts = rows <= block_m and (slots > 1 if parts is None else parts)
    out, logsumexp = plan.empty((b, t, hq, d), q.dtype), plan.empty((b, hq, t), torch.float32)
    block_d = max(16, triton.next_power_of_2(d))
    keys: list[Pointer] = [k, v]
    if tma:
        keys = [TensorMap(x, (1, 1, kernels.STEP.value, block_d)) for x in (k, v)]
    shared = {"SCALE": scale, "GROUP": group, "D": d, "BLOCK_D": block_d, "BLOCK_M": block_m}
    flags = {"PLACES": places is not None, "WINDOW": window > 0}
    targets: tuple[View | None, ...] = (out, logsumexp, None)
    if parts:
        state = (heads, slots, rows)
        targets = (plan.empty((*state, d), torch.float32), *(plan.empty(state, torch.float32) for _ in range(2)))
    plan.launch(
        kernels.attention_kernel,
        heads * (slots if parts else -(-rows // block_m)),
        (q, *keys, places, *targets),
        (heads, hkv, t, s, window, slots if parts else 1, *q.strides[:3], *k.strides[:3], *v.strides[:3]),
        {**shared, "PARTS": parts, **flags, "TMA": tma, "PRECISION": _precision(q)},
        num_warps=warps,
        num_stages=3 if is_ahead else 2,
        **OPTIONS,
    )
    if parts:
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
    if not (q.numel() and k.numel()) or q.dtype not in _ON_KERNELS or d > _LONGEST:
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


def _by_cudnn(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, scale: float, window: int,
    places: Tensor | None,
) -> bool:  # fmt: skip
    """Whether cuDNN has this gradient: of whole sequences without padding, where any order of sums is welcome."""
    return (
        q.is_cuda
        and window == 0
        and places is None
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[2] == k.shape[2] >= 128
        and q.shape[3] in (64, 128)
        and not torch.are_deterministic_algorithms_enabled()
        and torch_private.has_cudnn_attention()
    )


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
) -> Any:
    """Launch the twin of :func:`tritonfp8.reference.exact_attention_backward`; cuDNN's where it has one."""
    if _by_cudnn(grad, q, k, v, out, logsumexp, scale, window, places):
        return torch_private.cudnn_attention_backward(grad, q, k, v, out, logsumexp, scale)
    return _by_kernels(grad, q, k, v, out, logsumexp, scale, window, places)
