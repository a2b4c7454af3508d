"""What surrounds training: checks of a machine, a model and a step, recipes that change, and layers that are watched.

Exports the checks of ``tritonfp8 doctor``, :class:`RecipeSchedule`, and the functions ``verify``, ``verify_training``,
``monitor`` and ``sensitivity`` of :mod:`tritonfp8`; and what reads a model's output.
"""

from tritonfp8.workflow import doctor
from tritonfp8.workflow.doctor import accumulation_figures
from tritonfp8.workflow.health import SampledSteps, monitor, sensitivity
from tritonfp8.workflow.outputs import floating_tensors, own_loss
from tritonfp8.workflow.schedule import RecipeSchedule
from tritonfp8.workflow.training_check import TrainingCheck, verify_training
from tritonfp8.workflow.verification import verify
from tritonfp8.workflow.verification_report import (
    Failure,
    GemmReport,
    LayerReport,
    OtherGemms,
    VerificationError,
    VerificationReport,
)

__all__ = [
    "Failure",
    "GemmReport",
    "LayerReport",
    "OtherGemms",
    "RecipeSchedule",
    "SampledSteps",
    "TrainingCheck",
    "VerificationError",
    "VerificationReport",
    "accumulation_figures",
    "doctor",
    "floating_tensors",
    "own_loss",
    "verify",
    "verify_training",
    "monitor",
    "sensitivity",
]
