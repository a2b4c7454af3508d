"""A whole linear layer as one op, for compiled graphs: Dynamo does not trace inside it, which saves compile time.

Dynamo interprets each instruction that it traces, again for every layer. AOT autograd, the next stage, runs the op and
finds the ops inside and their gradients. So the compiled graphs are the same as without this op.
"""

from __future__ import annotations

import torch

from tritonfp8.ops import registry  # noqa: F401  defines the op
from tritonfp8.ops.direct import CODE as CODE

call = torch.ops.tritonfp8.linear.default
"""``call(input, weight, bias, *recipe.args, shares_input, dtype, CODE)``, of plain tensors; computes in ``dtype``."""
