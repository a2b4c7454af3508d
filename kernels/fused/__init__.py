"""Producers that quantize what they compute: RMSNorm and SwiGLU, forward and backward."""
