"""The function that computes a linear layer, by the tensor type of its operands: DTensor has its own."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from tritonfp8.compat.torch_private import constant_for_dynamo
from tritonfp8.layers import extensions
from tritonfp8.specs.checks import require_type

TENSORS = (Tensor, nn.Parameter)
PLAIN = (*TENSORS, type(None))
"""Types of operands that are their own data, or missing."""

Handler = Callable[..., Tensor]
"""``handler(input, weight, bias, recipe, shared_input, quantized_weight, output_placements)``."""


@constant_for_dynamo
def _fill() -> bool:
    """Import tritonfp8.distributed, also while Dynamo traces, which cannot follow an import."""
    extensions.distributed()
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
        # The type of an asynchronous collective's result is in torch.distributed, too. It needs no handler.
        if kind.__module__.startswith("torch.distributed.tensor"):
            _fill()
            record = extensions.filled()
            if record is not None and kind is record.tensor_type:
                return record.linear
        require_type(name, x, Tensor, "a torch.Tensor" if name != "bias" else "a torch.Tensor or None")
    return None
