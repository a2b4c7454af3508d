"""The training run of ``tritonfp8 train``: settings, loop, report, reference models and text.

Exports the settings, the run, its progress, the models, the report and the timers.
"""

from tritonfp8.training import report, timers
from tritonfp8.training.loop import UNTIMED_STEPS, TrainingStep, lr_factor, next_token_loss, run
from tritonfp8.training.models import MODELS, build_model, default_lr, read_config, require_train_extra
from tritonfp8.training.progress import Progress
from tritonfp8.training.settings import (
    BASELINE,
    DEFAULT_RECIPES,
    DEFAULTS,
    Settings,
    choose_device,
    existing_device,
    prepare,
)

__all__ = [
    "BASELINE",
    "DEFAULTS",
    "DEFAULT_RECIPES",
    "MODELS",
    "Progress",
    "Settings",
    "TrainingStep",
    "UNTIMED_STEPS",
    "build_model",
    "choose_device",
    "default_lr",
    "existing_device",
    "lr_factor",
    "next_token_loss",
    "prepare",
    "read_config",
    "report",
    "require_train_extra",
    "run",
    "timers",
]
