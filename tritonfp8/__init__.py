"""FP8, block-scaled and MX training and inference for PyTorch on Triton kernels.

    import tritonfp8
    report = tritonfp8.convert(model, "rowwise")

A :class:`QuantSpec` defines how one tensor is quantized. A :class:`Recipe` gives the specs of both operands of each of
the three GEMMs of a linear layer. :func:`convert` makes a model follow a recipe, and :func:`verify` shows what ran. The
ops are in :mod:`tritonfp8.ops`, their definitions in plain torch in :mod:`tritonfp8.reference`.
"""

import importlib
from typing import Any

# Imported first: it rejects unsupported versions of torch and triton, which would fail later on a missing name.
import tritonfp8.compat  # noqa: F401
from tritonfp8 import recipes
from tritonfp8.conversion import ConversionReport, convert, revert, swap_recipe
from tritonfp8.functional import dequantize, quantize, quantize_both, scaled_grouped_matmul, scaled_matmul
from tritonfp8.layers.linear import Float8Linear, quantize_weights_once
from tritonfp8.layers.moe import Float8Experts
from tritonfp8.recipes import Recipe
from tritonfp8.specs import QuantSpec
from tritonfp8.specs.quantized import Quantized, QuantizedGroups

__version__ = "0.1.0"

__all__ = [
    "ConversionReport",
    "Float8Experts",
    "Float8Linear",
    "QuantSpec",
    "Quantized",
    "QuantizedGroups",
    "Recipe",
    "RecipeSchedule",
    "VerificationError",
    "VerificationReport",
    "advise",
    "convert",
    "dequantize",
    "monitor",
    "quantize",
    "quantize_both",
    "quantize_weights_once",
    "quantized_init",
    "recipes",
    "revert",
    "scaled_grouped_matmul",
    "scaled_matmul",
    "sensitivity",
    "swap_recipe",
    "verify",
    "verify_training",
]

# Imported on first use: a plain training run needs none of them.
_LAZY = dict.fromkeys(
    (
        "RecipeSchedule", "VerificationError", "VerificationReport", "monitor", "sensitivity", "verify",
        "verify_training",
    ),
    "tritonfp8.workflow",
)  # fmt: skip
_LAZY["advise"] = "tritonfp8.advice"
_LAZY["quantized_init"] = "tritonfp8.conversion.stored_init"


def __getattr__(name: str) -> Any:
    if name in ("distributed", "export", "optim", "rollout"):
        return importlib.import_module(f"tritonfp8.{name}")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'tritonfp8' has no attribute {name!r}")
