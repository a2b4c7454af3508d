"""A whole linear layer as one op, for compiled graphs: Dynamo does not trace inside it, which saves compile time.

Dynamo interprets each instruction that it traces, again for every layer. AOT autograd, the next stage, runs the op and
finds the ops inside and their gradients. So the compiled graphs are the same as without this op.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch

from tritonfp8.ops import registry  # noqa: F401  defines the op

call = torch.ops.tritonfp8.linear.default
"""``call(input, weight, bias, *recipe.args, shares_input, dtype, CODE)``, of plain tensors; computes in ``dtype``."""

PACKAGE = Path(__file__).resolve().parents[1]


def digest(files: Iterable[Path]) -> str:
    """A hash of the contents of ``files``."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()


CODE = digest(PACKAGE.rglob("*.py"))
"""A hash of the code that the op may run: every module of the package, in all folders."""
