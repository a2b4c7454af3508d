"""Predict a training step on 8 to 2,048 GPUs from measured kernels: ``python -m bench.scale``."""
