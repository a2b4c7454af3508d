"""Kernels of optimizers."""
