"""Copies of stored weights by plain pickle, as processes send them to each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def reduced(x: Any, protocol: Any) -> tuple[Any, ...]:
    """``__reduce_ex__`` of a stored tensor: its inner tensors, and its attributes.

    pickle does not know memory of 8-bit floats, so they are sent as bytes.
    """
    names, context = x.__tensor_flatten__()
    inner = {name: getattr(x, name) for name in names}
    sent = {name: (t.view(torch.uint8) if t.itemsize == 1 else t, t.dtype) for name, t in inner.items()}
    others = {name: value for name, value in x.__dict__.items() if name not in inner}
    return _made, (type(x), sent, context, x.requires_grad, isinstance(x, nn.Parameter), others)


def _made(
    cls: Any,
    sent: dict[str, tuple[Tensor, torch.dtype]],
    context: Any,
    requires_grad: bool,
    is_parameter: bool,
    others: dict[str, Any],
) -> Tensor:
    x = cls.__tensor_unflatten__({name: t.view(dtype) for name, (t, dtype) in sent.items()}, context, None, None)
    found: Tensor = nn.Parameter(x, requires_grad) if is_parameter else x.requires_grad_(requires_grad)
    found.__dict__.update(others)
    return found
