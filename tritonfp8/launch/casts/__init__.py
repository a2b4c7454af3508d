"""Casts that do more than :mod:`tritonfp8.launch.cast`: sums of columns on the way, several matrices in one launch.

Exports the Triton twin of each of these ops, and what plans it.
"""

from tritonfp8.launch.casts.column_sums import plan_quantize_both_sum, quantize_both_sum
from tritonfp8.launch.casts.weights import MOST_WEIGHTS, quantize_weights

__all__ = ["MOST_WEIGHTS", "plan_quantize_both_sum", "quantize_both_sum", "quantize_weights"]
