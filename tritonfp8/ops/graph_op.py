"""A whole linear layer as one op, for compiled graphs: Dynamo then traces nothing of what is inside.

Dynamo interprets each instruction of what it traces, for every layer anew. AOT autograd, which comes after it, runs the
op, and finds the ops that it consists of and their gradients: the graphs that are compiled are the same.
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
    """The contents of ``files`` in a few characters."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()


CODE = digest(PACKAGE.rglob("*.py"))
"""What the op consists of: every module of the package, in all its folders."""
