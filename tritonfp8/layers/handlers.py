"""Which function computes a linear layer on tensors that stand for something else than their local data."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tritonfp8.specs import require_type

PLAIN = (Tensor, nn.Parameter, type(None))
"""Types of operands that are what they look like, or are not there."""

Handler = Callable[..., Tensor]
"""``handler(input, weight, bias, recipe, shared_input)``."""
_handlers: dict[type, Handler] = {}


# The part of the package that registers a handler for types of these modules; it is imported when one comes.
_PROVIDERS = {"torch.distributed.tensor": "tritonfp8.distributed"}


def register_linear(tensor_type: type, handler: Handler) -> None:
    """Let ``handler(input, weight, bias, recipe, shared_input)`` compute :func:`linear` on operands of this type.

    For tensors that stand for something else than their local data, such as DTensor.
    """
    _handlers[tensor_type] = handler


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _import(provider: str) -> bool:
    """Run while Dynamo traces, too, which cannot follow an import."""
    importlib.import_module(provider)
    return True


def handler_of(input: Tensor, weight: Tensor, bias: Tensor | None) -> Handler | None:
    """The handler for the first operand whose type has one.

    Raises:
        TypeError: an operand that is no tensor.
    """
    for name, x in (("input", input), ("weight", weight), ("bias", bias)):
        kind = type(x)
        if kind in PLAIN:
            if x is None and name != "bias":
                raise TypeError(f"{name} must be a torch.Tensor; got None")
            continue
        for module, provider in _PROVIDERS.items():
            # Results of asynchronous collectives, whose type is in torch.distributed too, wait for themselves.
            if kind.__module__.startswith(module):
                _import(provider)
        if kind in _handlers:
            return _handlers[kind]
        require_type(name, x, Tensor, "a torch.Tensor" if name != "bias" else "a torch.Tensor or None")
    return None
