"""SwiGLU between the two linear layers of experts, as an op: the casts of grouped GEMMs compute the same bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.layers.first_order import first_order


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return ops.swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (gate_up,) = ctx.saved_tensors
        (found,) = first_order(lambda: (ops.swiglu_backward(grad, gate_up),))
        return found


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``gate_up [rows, 2 F]``, the gate first; ``[rows, F]``. Differentiable once."""
    return _Swiglu.apply(gate_up)  # type: ignore[no-untyped-call]
