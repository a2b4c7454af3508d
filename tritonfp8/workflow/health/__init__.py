"""The numerical health of a model in training: what FP8 does to each layer's operands, and which layers it hurts.

    statistics     the figures of operands, on their device
    groups         operands of one shape, measured together
    observer       hooks that measure the operands of a step, and nothing in other steps
    thresholds     figures that deserve a warning, with advice, as data
    monitoring     monitor(): measure every N steps, keep the figures, warn
    summary        the figures of a step in a few numbers, and the worst layers
    sampled_steps  samples of a trainer's steps, for its callbacks
    heat_map       the figures of layers and steps as an image
    gemm_errors    sensitivity(): the error that each recipe causes in each layer

Exports the results of :func:`tritonfp8.monitor` and :func:`tritonfp8.sensitivity`; ``workflow`` has the functions.
"""

from tritonfp8.workflow.health.gemm_errors import Sensitivity, sensitivity
from tritonfp8.workflow.health.monitoring import Monitor, monitor
from tritonfp8.workflow.health.sampled_steps import SampledSteps
from tritonfp8.workflow.health.statistics import FIELDS
from tritonfp8.workflow.health.thresholds import THRESHOLDS, Finding, Threshold

__all__ = [
    "FIELDS",
    "THRESHOLDS",
    "Finding",
    "Monitor",
    "Sensitivity",
    "Threshold",
]
