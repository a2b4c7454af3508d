"""Checks of an installation before training: whether and how FP8 runs here, and how accurately.

Exports the checks of ``tritonfp8 doctor``.
"""

from tritonfp8.workflow import doctor
from tritonfp8.workflow.doctor import MISSING, accumulation_figures

__all__ = [
    "MISSING",
    "accumulation_figures",
    "doctor",
]
