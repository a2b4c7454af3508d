"""Ops whose rows have bits of their own.

rows        norms, logsumexp and gates
gemm        a GEMM in high precision
attention   forward, whole or in parts, and backward
"""

from tritonfp8.launch.exact.attention import exact_attention, exact_attention_backward
from tritonfp8.launch.exact.gemm import matmul
from tritonfp8.launch.exact.rows import gated, gated_backward, rms_norm, rms_norm_backward, row_logsumexp
