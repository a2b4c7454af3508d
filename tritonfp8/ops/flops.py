"""The FLOPs of the ops, for ``torch.utils.flop_counter.FlopCounterMode``: equal to the plain linear layer's.

FlopCounterMode counts the ops that it knows. Casts are not counted, as torch counts no pointwise op.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.utils.flop_counter import register_flop_formula

from tritonfp8.ops import registry

_Shape = Sequence[int]


def _product(a: _Shape, b: _Shape) -> int:
    """Of ``a [M, K] @ b [N, K].T``."""
    return 2 * a[0] * a[1] * b[0]


def scaled_matmul(a: _Shape, a_scale: _Shape, a_spec: str, b: _Shape, *others: object, **options: object) -> int:
    """Of ``a [M, K] @ b [N, K].T``, whatever the epilogue."""
    return _product(a, b)


def packed_matmul(a: _Shape, a_scale: _Shape, a_spec: str, b: _Shape, *others: object, **options: object) -> int:
    """Of ``a [M, K] @ b.T``, where ``b [N, K / 2]`` has two codes a byte."""
    return _product(a, b)


def packed_grouped_matmul(
    a: _Shape, a_scale: _Shape, a_spec: str, b: _Shape, *others: object, **options: object
) -> int:  # fmt: skip
    """Of all rows of ``a [tokens, K]`` by one matrix of ``b [E, N, K / 2]``."""
    return _product(a, b[1:])


def matmul(a: _Shape, b: _Shape, *others: object, **options: object) -> int:
    """Of ``a [M, K] @ b [N, K].T``, with a bias or without."""
    return _product(a, b)


def whole_linear(input: _Shape, weight: _Shape, *others: object, **options: object) -> int:
    """Of ``input [..., K] @ weight [N, K].T``."""
    return 2 * math.prod(input) * weight[0]


def whole_linear_backward(
    grad_output: _Shape,
    input: _Shape,
    weight: _Shape,
    recipe: str,
    needs_input: bool,
    needs_weight: bool,
    *others: object,
    **options: object,
) -> int:
    """Of the gradients that are needed; each takes as much as the output."""
    return whole_linear(input, weight) * (needs_input + needs_weight)


def scaled_grouped_matmul(
    a: _Shape, a_scale: _Shape, a_spec: str, b: _Shape, *others: object, tokens: int = 0, **options: object
) -> int:
    """Of all rows of ``a [tokens, K]`` by one matrix of ``b``; or over the tokens in the columns of both."""
    if len(b) == 3:
        return _product(a, b[1:])
    # The eleventh argument after the first one, if it is not given by name.
    return _product((a[0], int(others[7]) if len(others) > 7 else tokens), b)  # type: ignore[call-overload]


def grouped_matmul(a: _Shape, b: _Shape, *others: object, **options: object) -> int:
    """As :func:`scaled_grouped_matmul`."""
    return _product(a, b[-2:])


for _formula in (
    scaled_matmul,
    packed_matmul,
    packed_grouped_matmul,
    matmul,
    scaled_grouped_matmul,
    grouped_matmul,
    whole_linear,
    whole_linear_backward,
):
    register_flop_formula(getattr(getattr(torch.ops, registry.NAMESPACE), _formula.__name__))(_formula)
