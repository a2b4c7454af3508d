"""Optimizers of weights that are stored in 8 bits.

    adamw      AdamW, without a copy of the weights in high precision
    moments    its moments, in float32, bfloat16 or 8 bits
    masters    any optimizer of torch on float32 copies
    average    a copy of a model in float32, for averages

Exports also the count of what others write to the values of such weights.
"""

from tritonfp8.layers.stored import DirectSteps, direct_steps
from tritonfp8.optim.adamw import AdamW
from tritonfp8.optim.average import float32_copy
from tritonfp8.optim.masters import with_masters

__all__ = ["AdamW", "DirectSteps", "direct_steps", "float32_copy", "with_masters"]
