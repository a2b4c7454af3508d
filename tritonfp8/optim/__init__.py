"""Optimizers of weights that are stored in 8 bits.

adamw      AdamW, without a copy of the weights in high precision
moments    the moments of AdamW in float32, bfloat16 or 8 bits
"""

from tritonfp8.optim.adamw import AdamW

__all__ = ["AdamW"]
