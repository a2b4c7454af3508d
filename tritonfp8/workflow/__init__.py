"""What a user asks about an installation before training: does FP8 run here, how exactly, how fast.

Exports the checks of ``tritonfp8 doctor``.
"""

from tritonfp8.workflow import doctor
from tritonfp8.workflow.doctor import MISSING, accumulation_figures

__all__ = [
    "MISSING",
    "accumulation_figures",
    "doctor",
]
