"""First-order gradients: layers that round gradients to 8 bits have no second derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor


def refuse_second_derivative(*args: object) -> NoReturn:
    """The ``backward`` of gradients that cannot be differentiated again: it raises."""
    raise RuntimeError(
        "a linear layer that follows a recipe has no second derivative: its gradients are rounded to 8 bits. "
        "Differentiate once, or use tritonfp8.revert(model), or the filter of tritonfp8.convert, for this layer."
    )


class _NoSecondDerivative(torch.autograd.Function):
    """Identity of a gradient; differentiating it is an error that says so.

    ``anchor`` requires a gradient, so that the result does: transforms of ``torch.func`` forbid ``requires_grad_()``.
    """

    # torch.vmap may call torch.autograd.grad.
    generate_vmap_rule = True

    @staticmethod
    def forward(grad: Tensor, anchor: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        refuse_second_derivative()


def first_order(compute: Callable[..., tuple[Tensor | None, ...]], *args: Any) -> tuple[Tensor | None, ...]:
    """The gradients that ``compute(*args)`` returns, which raise if they are differentiated again."""
    # Grad mode is on here if the caller asked for create_graph. Compiled graphs refuse create_graph by themselves.
    if not torch.is_grad_enabled():
        # Host time: to enter no_grad takes as long as a kernel's launch.
        return compute(*args)
    differentiable = not torch.compiler.is_compiling()
    with torch.no_grad():
        grads = compute(*args)
    if not differentiable:
        return grads
    anchor = torch.zeros((), requires_grad=True)
    apply = _NoSecondDerivative.apply
    return tuple(
        g if g is None else apply(g, anchor)  # type: ignore[no-untyped-call]
        for g in grads
    )
