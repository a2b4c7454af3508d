"""RMSNorm and SwiGLU, forward and backward, that quantize their results in the same kernel."""
