"""Measurements of whole training runs."""
