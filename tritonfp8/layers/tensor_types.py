"""The function that computes a linear layer, by the tensor type of its operands: DTensor has its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from torch import Tensor, nn

from tritonfp8.checks import require_type
from tritonfp8.compat.torch_private import constant_for_dynamo

PLAIN = (Tensor, nn.Parameter, type(None))
"""Types of operands that are their own data, or missing."""

Handler = Callable[..., Tensor]
"""``handler(input, weight, bias, recipe, shared_input, quantized_weight)``."""
_handlers: dict[type, Handler] = {}


# By the module of a tensor type, the part of this package that registers its handler. It is imported on demand.
_REGISTERED_BY = {"torch.distributed.tensor": "tritonfp8.distributed"}


def register_linear(tensor_type: type, handler: Handler) -> None:
    """Let ``handler(*arguments of linear)`` compute :func:`linear` on operands of this type.

    For types whose local data is not the whole tensor, such as DTensor.
    """
    _handlers[tensor_type] = handler


@constant_for_dynamo
def _import(module: str) -> bool:
    """Import a module, also while Dynamo traces, which cannot follow an import."""
    importlib.import_module(module)
    return True


def handler_of(input: Tensor, weight: Tensor, bias: Tensor | None) -> Handler | None:
    """The handler of the first operand whose type has one; None if all compute as plain tensors.

    Raises:
        TypeError: an operand that is no tensor.
    """
    for name, x in (("input", input), ("weight", weight), ("bias", bias)):
        kind = type(x)
        if kind in PLAIN:
            if x is None and name != "bias":
                raise TypeError(f"{name} must be a torch.Tensor; got None")
            continue
        for place, module in _REGISTERED_BY.items():
            # The type of an asynchronous collective's result is in torch.distributed, too. It needs no handler.
            if kind.__module__.startswith(place):
                _import(module)
        if kind in _handlers:
            return _handlers[kind]
        require_type(name, x, Tensor, "a torch.Tensor" if name != "bias" else "a torch.Tensor or None")
    return None
