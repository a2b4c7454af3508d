"""Kernels whose rows have bits of their own: attention, norms, logsumexp, gates, a GEMM in high precision."""
