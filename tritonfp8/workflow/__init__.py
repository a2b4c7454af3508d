"""What surrounds training: checks of an installation before it, and recipes that change during it.

Exports the checks of ``tritonfp8 doctor`` and :class:`RecipeSchedule`.
"""

from tritonfp8.workflow import doctor
from tritonfp8.workflow.doctor import MISSING, accumulation_figures
from tritonfp8.workflow.schedule import RecipeSchedule

__all__ = [
    "MISSING",
    "RecipeSchedule",
    "accumulation_figures",
    "doctor",
]
