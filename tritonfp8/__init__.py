"""FP8, block-scaled and MX training and inference for PyTorch on Triton kernels.

    import tritonfp8
    report = tritonfp8.convert(model, "rowwise")

The design in one paragraph: a :class:`QuantSpec` says how a tensor is quantized, a :class:`Recipe` which operand of
which matrix product of a linear layer uses which spec, :func:`convert` makes a model follow a recipe. The ops are in
:mod:`tritonfp8.ops`, their meaning in :mod:`tritonfp8.reference`.
"""

import importlib
from typing import Any

# First: a torch or triton of another version fails at whatever it lacks.
import tritonfp8.compat  # noqa: F401
from tritonfp8 import recipes
from tritonfp8.convert import ConversionReport, convert, revert, swap_recipe
from tritonfp8.functional import dequantize, quantize, quantize_both, scaled_matmul
from tritonfp8.layers.linear import Float8Linear, quantize_weights_once
from tritonfp8.quantized import Quantized
from tritonfp8.recipes import Recipe
from tritonfp8.specs import QuantSpec

__version__ = "0.1.0"

__all__ = [
    "ConversionReport",
    "Float8Linear",
    "QuantSpec",
    "Quantized",
    "Recipe",
    "convert",
    "dequantize",
    "quantize",
    "quantize_both",
    "quantize_weights_once",
    "recipes",
    "revert",
    "scaled_matmul",
    "swap_recipe",
]


def __getattr__(name: str) -> Any:
    # Not with the package: it takes torch.distributed, and the core does without.
    if name == "distributed":
        return importlib.import_module("tritonfp8.distributed")
    raise AttributeError(f"module 'tritonfp8' has no attribute {name!r}")
