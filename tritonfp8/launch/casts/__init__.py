"""Casts that do more than :mod:`tritonfp8.launch.cast`: they sum columns, return the amax, take several
matrices or codes.

Exports the Triton twin of each of these ops, and what plans it.
"""

from tritonfp8.launch.casts.column_sums import quantize_both_sum
from tritonfp8.launch.casts.known_amax import quantize_with_amax
from tritonfp8.launch.casts.rows import can_plan_rows, plan_rows
from tritonfp8.launch.casts.transposed import transpose
from tritonfp8.launch.casts.weights import MOST_WEIGHTS, quantize_weights
