"""Measurements. Each module is a command that writes data into ``bench/results/``."""
