"""Measurements of whole training runs: recipes that change while a model trains, and scales that are predicted.

Each file is a command: ``python -m bench.training.<name> --help``.
"""
