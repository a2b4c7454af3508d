"""Optimizers of weights that are stored in 8 bits.

    adamw      AdamW, without a copy of the weights in high precision
    moments    its moments, in float32, bfloat16 or 8 bits
    masters    any optimizer of torch on float32 copies

Exports also the count of the steps of other optimizers, which write to the values of such weights.
"""

from tritonfp8.layers.stored import DirectSteps, direct_steps
from tritonfp8.optim.adamw import AdamW
from tritonfp8.optim.masters import with_masters

__all__ = ["AdamW", "DirectSteps", "direct_steps", "with_masters"]
