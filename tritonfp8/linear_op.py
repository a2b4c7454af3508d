"""A whole linear layer as one op, for compiled graphs: Dynamo then traces nothing of what is inside.

Dynamo interprets each instruction of what it traces, for every layer anew. AOT autograd, which comes after it, runs the
op, and finds the ops that it consists of and their gradients: the graphs that are compiled are the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

_library = torch.library.Library("tritonfp8", "FRAGMENT")
# Torch keeps on disk what it made of a graph, and finds it by the graph's text. The last two arguments are there for
# that alone: without them a graph would go on as it was after the dtype of the autocast around it, or the code of the
# op, has changed.
_library.define(
    "linear(Tensor input, Tensor weight, Tensor? bias, str recipe, bool shares_input, ScalarType dtype, str code) "
    "-> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)

call = torch.ops.tritonfp8.linear.default
"""``call(input, weight, bias, *recipe.args, shares_input, dtype, CODE)``, of plain tensors; computes in ``dtype``."""

CODE = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))).hexdigest()
"""What the op consists of, in a few characters."""


def implementation(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorator: what the op is, in terms of others."""
    _library.impl("linear", function, "CompositeImplicitAutograd")
    return function
