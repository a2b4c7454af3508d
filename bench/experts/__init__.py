"""Benchmarks of mixtures of experts: grouped GEMMs and casts, and whole layers, against torch's grouped GEMMs."""
