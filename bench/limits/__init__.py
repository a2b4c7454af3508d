"""Measurements of what limits a figure: power of GEMMs, host time of a call, the first step of a process."""
