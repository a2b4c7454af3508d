"""Copies of stored weights by plain pickle, as processes send them to each other; and what a replacement keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def kind_of(cls: Any) -> Any:
    """The class that a stored tensor of class ``cls`` has on a device that computes."""
    return cls.__dict__.get("kind", cls)


def carry_marks(found: Tensor, before: Tensor) -> Tensor:
    """``found``, with the attributes that other code set on ``before``, whose place it takes.

    transformers marks what it has loaded, and initializes a weight without the mark again.
    """
    if found is not before:
        # A tensor subclass has attributes of its own, which belong to its memory.
        own = nn.Parameter(before.detach(), False).__dict__.keys() | found.__dict__.keys()
        found.__dict__.update({name: value for name, value in before.__dict__.items() if name not in own})
    return found


def replacing(before: Tensor, weight: Tensor, requires_grad: bool) -> nn.Parameter:
    """A Parameter of ``weight`` in the place of ``before``, whose marks it has."""
    parameter = nn.Parameter(weight, requires_grad)
    carry_marks(parameter, before)
    return parameter


def reduced(x: Any, protocol: Any) -> tuple[Any, ...]:
    """``__reduce_ex__`` of a stored tensor: its inner tensors, and its attributes.

    pickle does not know memory of 8-bit floats, so they are sent as bytes.
    """
    names, context = x.__tensor_flatten__()
    inner = {name: getattr(x, name) for name in names}
    sent = {name: (t.view(torch.uint8) if t.itemsize == 1 else t, t.dtype) for name, t in inner.items()}
    others = {name: value for name, value in x.__dict__.items() if name not in inner}
    return _made, (kind_of(type(x)), sent, context, x.requires_grad, isinstance(x, nn.Parameter), others)


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
