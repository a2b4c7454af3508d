"""Launch attention whose rows have bits of their own: whole, or for few queries in parts; and its gradient."""

from __future__ import annotations

import math
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
from tritonfp8.launch.plan import Planner, Pointer, View

_STEPS = {"STEP": reference.SUB_TILE, "STEPS": reference.SPLIT // reference.SUB_TILE}
# Rows of a tile, and warps. Fewer rows would take another instruction, which sums in another order.
_FEW, _MANY = (64, 4), (128, 8)
_LONGEST = 256
_MERGED_ROWS = 4
_ON_KERNELS = (torch.bfloat16, torch.float16, torch.float32)


def _fits(*views: View) -> bool:
    """Whether kernels read these heads: elements of a row follow each other."""
    return all(x.numel() and x.strides[3] == 1 and x.shape[3] <= _LONGEST and x.dtype in _ON_KERNELS for x in views)


def _dense(x: View) -> Tensor:
    """The layout of ``torch.empty_like``."""
    return torch.empty_like(torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device="meta"))


def _strides(*views: View) -> list[int]:
    return [stride for x in views for stride in x.strides[:3]]


def _shared(q: View, k: View, places: View | None, scale: float, window: int) -> dict[str, object]:
    return {
        "FACTOR": scale * math.log2(math.e),
        "GROUP": q.shape[1] // k.shape[1],
        "WINDOW": window,
        "HAS_PLACES": places is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else None,
        "BLOCK_D": max(16, triton.next_power_of_2(q.shape[3])),
    }


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
) -> list[View] | None:
    """As :func:`plan_exact_attention`; ``parts`` and ``tile`` (rows, warps) replace what would be chosen."""
    reference.check_attention(q, k, v, places, window)
    if not _fits(q, k, v) or (places is not None and not places.is_contiguous()):
        return None
    (b, heads, t, d), s = q.shape, k.shape[2]
    group = heads // k.shape[1]
    if parts is None:
        parts = t * group <= _FEW[0] and s > reference.SPLIT
    pack = group if parts else 1
    rows, warps = tile or (_MANY if t * pack > _FEW[0] and d <= 128 and q.itemsize == 2 else _FEW)
    tiles = -(-t * pack // rows)
    # One more: the first split may begin before the first key.
    count = -(-s // reference.SPLIT) + 1 if parts else 1
    out = plan.empty((b, t, heads, d), q.dtype)
    logsumexp = plan.empty((b, heads, t), torch.float32)
    states: list[Pointer] = [logsumexp, logsumexp, logsumexp]
    if parts:
        shape = (b, heads // pack, count, t * pack)
        states = [plan.empty(x, torch.float32) for x in (shape, shape, (*shape, d))]
    shared = _shared(q, k, places, scale, window)
    plan.launch(
        kernels.attention_kernel,
        b * heads // pack * tiles * count,
        (q, k, v, q if places is None else places, out, logsumexp, *states),
        (heads, t, s, d, tiles, count, *_strides(q, k, v)),
        {**shared, "PACK": pack, "PARTS": parts, "BLOCK_M": rows, **_STEPS, "STAGES": 2},
        num_warps=warps,
        **OPTIONS,
    )
    if parts:
        plan.launch(
            kernels.merge_parts_kernel,
            b * heads // pack * -(-t * pack // _MERGED_ROWS),
            (*states, out, logsumexp),
            (heads, t, d, count),
            {"PACK": pack, "BLOCK_M": _MERGED_ROWS, "BLOCK_D": shared["BLOCK_D"]},
            num_warps=4,
            **OPTIONS,
        )
    return [out, logsumexp]


def plan_exact_attention(
    plan: Planner, q: View, k: View, v: View, places: View | None, scale: float, window: int
) -> list[View] | None:
    """Two outputs: ``[B, T, Hq, D]`` and the logsumexp ``[B, Hq, T]``."""
    return plan_parts(plan, q, k, v, places, scale, window)


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
    """Three outputs, in the layouts of ``q``, ``k`` and ``v``: the gradients of ``q``, ``k`` and ``v``."""
    reference.check_attention(q, k, v, places, window)
    given = [x for x in (grad, out, logsumexp, places) if x is not None]
    if not _fits(q, k, v) or not all(x.is_contiguous() for x in given):
        return None
    (b, heads, t, d), (_, of_heads, s, _) = q.shape, k.shape
    dots = plan.empty((b, heads, t), torch.float32)
    of_q, of_k, of_v = (plan.like(_dense(x)) for x in (q, k, v))
    shared = _shared(q, k, places, scale, window)
    block = 64 if d <= 128 and q.itemsize == 2 else 32
    rows = b * t * heads
    of_d = {"BLOCK_D": shared["BLOCK_D"]}
    plan.launch(
        backward_kernels.row_dots_kernel, -(-rows // 16), (grad, out, dots), (rows, heads, t, d),
        {"BLOCK_M": 16, **of_d}, num_warps=4,
    )  # fmt: skip
    pointers = (q, k, v, q if places is None else places, grad, logsumexp, dots)
    constants = {"SCALE": scale, **shared, "BLOCK": block, "STAGES": 2}
    order = ("SCALE", "FACTOR", "GROUP", "WINDOW", "HAS_PLACES", "PRECISION", "BLOCK", "BLOCK_D", "STAGES")
    ordered = {name: constants[name] for name in order}
    tiles = -(-t // block)
    plan.launch(
        backward_kernels.query_gradient_kernel,
        b * heads * tiles,
        (*pointers, of_q),
        (heads, t, s, d, tiles, *_strides(q, k, v, of_q)),
        ordered,
        num_warps=4,
    )
    tiles = -(-s // block)
    plan.launch(
        backward_kernels.key_gradients_kernel,
        b * of_heads * tiles,
        (*pointers, of_k, of_v),
        (heads, t, s, d, tiles, *_strides(q, k, v, of_k, of_v)),
        ordered,
        num_warps=4,
    )
    return [of_q, of_k, of_v]


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
