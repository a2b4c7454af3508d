"""Recipes: the spec of each operand in each of the three GEMMs of a linear layer. Data, not code.

A linear layer of ``weight [N, K]`` on ``input [M, K]`` runs three GEMMs. Each is written here as
``lhs [., C] @ rhs [., C].T``. The contraction ``C`` is last in both operands, as FP8 tensor cores read them, and the
spec of an operand refers to this layout:

    output      [M, N] = input         [M, K] @ weight  [N, K].T        contraction K
    grad_input  [M, K] = grad_output   [M, N] @ weight.T [K, N].T       contraction N
    grad_weight [N, K] = grad_output.T [N, M] @ input.T  [K, M].T       contraction M

``Q[...]`` in the docstrings below is :func:`tritonfp8.quantize` with the spec named in the brackets.

Exports the classes, the built-in recipes by name, and files of recipes.
"""

from tritonfp8.recipes.named import (
    bf16,
    blockwise,
    describe,
    get,
    load,
    mxfp4_weights,
    mxfp8,
    names,
    of_layers,
    rowwise,
    rowwise_hp_grad_weight,
    save,
    summary,
    tensorwise,
)
from tritonfp8.recipes.recipe import GEMMS, OPERANDS, Gemm, Recipe, recipe_of

__all__ = [
    "GEMMS",
    "OPERANDS",
    "Gemm",
    "bf16",
    "blockwise",
    "describe",
    "get",
    "load",
    "mxfp4_weights",
    "mxfp8",
    "names",
    "rowwise",
    "rowwise_hp_grad_weight",
    "save",
    "summary",
    "tensorwise",
]
