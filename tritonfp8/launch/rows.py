"""Rows of experts in high precision: SwiGLU, and sums of the rows of a token. Twins of the reference's."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonfp8 import reference
from tritonfp8.kernels.cast import groups as kernels
from tritonfp8.launch.executor import planned
from tritonfp8.launch.launcher import launcher
from tritonfp8.launch.plan import Planner, View
from tritonfp8.tuning import cast_tiles

# Products and sums that the reference rounds one by one are no FMA.
OPTIONS = {"enable_fp_fusion": False}


def plan_swiglu(plan: Planner, x: View) -> list[View] | None:
    """One output, ``[rows, F]``."""
    return [add_swiglu(plan, x, None)] if x.numel() else None


def plan_swiglu_backward(plan: Planner, grad: View, gate_up: View) -> list[View] | None:
    """One output, ``[rows, 2 F]``."""
    return [add_swiglu(plan, grad, gate_up)] if gate_up.numel() else None


def plan_swiglu_backward_(plan: Planner, grad: View, gate_up: View) -> list[View] | None:
    """No output: ``gate_up`` is written over."""
    if not (gate_up.numel() and gate_up.is_contiguous()):
        return None
    add_swiglu(plan, grad, gate_up, gate_up)
    return []


def add_swiglu(plan: Planner, x: View, gate_up: View | None, out: View | None = None) -> View:
    """Add the launch of SwiGLU of ``x``, or of the gradient of ``gate_up``, where ``x`` is the result's gradient.

    ``out`` is where it is written, contiguous and possibly ``gate_up``; None allocates it.
    """
    of = x if gate_up is None else gate_up
    rows, features = of.shape[0], of.shape[1] // 2
    if out is None:
        out = plan.empty((rows, features if gate_up is None else 2 * features), of.dtype)
    tile = cast_tiles.SWIGLU
    plan.launch(
        kernels.swiglu_kernel,
        tile.programs(rows, features),
        (x, of, out),
        (rows, features, *x.strides, *of.strides),
        {"BACKWARD": gate_up is not None, **tile.sizes()},
        **tile.options(),
    )
    return out


swiglu = launcher(plan_swiglu, reference.swiglu)
swiglu_backward = launcher(plan_swiglu_backward, reference.swiglu_backward)


def swiglu_backward_(grad: Tensor, gate_up: Tensor) -> Tensor:
    """:func:`swiglu_backward`, written over ``gate_up``, which is returned."""
    if planned(plan_swiglu_backward_, (grad, gate_up), ()) is None:
        gate_up.copy_(swiglu_backward(grad, gate_up))
    return gate_up


def plan_sum_of_rows(plan: Planner, x: View, places: View, factors: View | None) -> list[View] | None:
    """One output, ``[tokens, N]``."""
    contiguous = places.is_contiguous() and (factors is None or factors.is_contiguous())
    if not (x.numel() and places.numel() and contiguous):
        return None
    (tokens, each), n = places.shape, x.shape[1]
    dtype = x.dtype if factors is None else torch.promote_types(x.dtype, factors.dtype)
    out = plan.empty((tokens, n), dtype)
    tile = cast_tiles.SUM_OF_ROWS
    plan.launch(
        kernels.sum_of_rows_kernel,
        tile.programs(tokens, n),
        (x, places, factors, out),
        (tokens, n, *x.strides),
        {
            "EACH": each, "SCALED": factors is not None, "ROUNDED": dtype == x.dtype, **tile.sizes(),
        },
        **tile.options(),
        **OPTIONS,
    )  # fmt: skip
    return [out]


sum_of_rows = launcher(plan_sum_of_rows, reference.sum_of_rows)


def plan_dots_of_rows(plan: Planner, grad: View, x: View, places: View, out_dtype: torch.dtype) -> list[View] | None:
    """One output, ``[tokens, n]``."""
    if not (x.numel() and places.numel() and places.is_contiguous()):
        return None
    (tokens, each), n = places.shape, x.shape[1]
    out = plan.empty((tokens, each), out_dtype)
    tile = cast_tiles.dots_of_rows(each)
    plan.launch(
        kernels.dots_of_rows_kernel,
        tokens,
        (grad, x, places, out),
        (n, *grad.strides, *x.strides),
        {
            "EACH": each, "ROUNDED": torch.promote_types(x.dtype, out_dtype) == x.dtype, **tile.sizes(),
        },
        **tile.options(),
        **OPTIONS,
    )  # fmt: skip
    return [out]


dots_of_rows = launcher(plan_dots_of_rows, reference.dots_of_rows)
