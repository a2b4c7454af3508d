"""Lightning: precision plugins for the Trainer and for Fabric that convert a model to FP8.

    from tritonfp8.integrations.lightning import fabric_plugin, trainer_plugin

    trainer = lightning.Trainer(plugins=[trainer_plugin("rowwise", precision="bf16-mixed")])
    fabric = lightning.Fabric(plugins=[fabric_plugin("rowwise", precision="bf16-true")])

The model is converted when the Trainer sets it up, after ``configure_model``, or in ``fabric.setup``. Parameters stay
the same objects.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

try:
    from lightning.fabric.plugins.precision import HalfPrecision as FabricHalf
    from lightning.fabric.plugins.precision import MixedPrecision as FabricMixed
    from lightning.fabric.plugins.precision import Precision as FabricPrecision
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers import TensorBoardLogger
    from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
except ImportError as error:
    raise ImportError(
        "tritonfp8.integrations.lightning needs lightning: pip install 'tritonfp8[integrations]'"
    ) from error

from tritonfp8.conversion import ConversionReport, convert
from tritonfp8.distributed import enable_float8_all_gather
from tritonfp8.specs.checks import require
from tritonfp8.workflow import SampledSteps

FABRIC = {"32-true": FabricPrecision, "bf16-true": FabricHalf, "bf16-mixed": FabricMixed}
TRAINER = {"32-true": Precision, "bf16-true": HalfPrecision, "bf16-mixed": MixedPrecision}
"""Lightning's plugin of each precision, which the model is converted on top of."""

log = logging.getLogger("tritonfp8")


class _Float8:
    """The part of a plugin that converts.

    Attributes:
        report: the report of :func:`tritonfp8.convert`; None before a model is set up.
        gathered: the report of :func:`tritonfp8.distributed.enable_float8_all_gather`; None without it.
    """

    recipe: Any
    filter: Any
    all_gather: bool
    health: HealthOfSteps | None = None
    report: ConversionReport | None = None
    gathered: ConversionReport | None = None

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Called by Lightning with the model, in place."""
        module = super().convert_module(module)  # type: ignore[misc]
        self.report = convert(module, self.recipe, self.filter)
        log.info("%s", self.report)
        if self.all_gather and not self.report.is_empty:
            self.gathered = enable_float8_all_gather(module)
        if self.health is not None and not self.report.is_empty and isinstance(module, LightningModule):
            self.health.join(module.trainer)
        return module


class HealthOfSteps(Callback):
    """Samples every N-th optimizer step, and logs its figures to the loggers of the Trainer."""

    def __init__(self, every: int) -> None:
        self._steps = SampledSteps(every)
        self._step = 0

    def join(self, trainer: Trainer) -> None:
        """Add this to the callbacks of a Trainer, once."""
        if self not in trainer.callbacks:
            trainer.callbacks.append(self)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Begin a sample, before the first of the batches that an optimizer step accumulates."""
        self._step = trainer.global_step
        self._steps.begin(pl_module, self._step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log, unless the next batch belongs to the same step."""
        if trainer.global_step > self._step and (figures := self._steps.end()):
            _log(figures, trainer, self._step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave no hooks of a step that did not end."""
        self._steps.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave no hooks of a step that did not end."""
        self._steps.close()


def _log(figures: dict[str, Any], trainer: Trainer, step: int) -> None:
    """Log figures at once: ``LightningModule.log`` drops a step that is no multiple of ``log_every_n_steps``."""
    numbers = {name: value for name, value in figures.items() if not isinstance(value, str)}
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            # It takes text only by a function of its own.
            logger.log_metrics(numbers, step)
            for name in figures.keys() - numbers.keys():
                logger.experiment.add_text(name, figures[name], step)
        else:
            logger.log_metrics(figures, step)


def _plugin(plugins: dict[str, type[Any]], precision: str, **options: Any) -> Any:
    require("precision", precision, tuple(plugins))
    base = plugins[precision]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments = {"32-true": (), "bf16-true": (precision,), "bf16-mixed": (precision, device)}[precision]
    plugin = type(f"Float8{base.__name__}", (_Float8, base), {})(*arguments)
    for name, value in options.items():
        setattr(plugin, name, value)
    return plugin


def trainer_plugin(
    recipe: Any = "rowwise",
    precision: str = "bf16-mixed",
    filter: Any = None,
    all_gather: bool = False,
    health_every: int | None = None,
) -> Any:
    """A plugin for ``lightning.Trainer(plugins=[...])``.

    Args:
        recipe, filter: as for :func:`tritonfp8.convert`. Names begin with an attribute of the LightningModule.
        precision: of everything else: ``"bf16-mixed"``, ``"bf16-true"`` or ``"32-true"``.
        all_gather: whether FSDP2 (``ModelParallelStrategy``) gathers weights in 8 bits.
        health_every: optimizer steps from one step that :func:`tritonfp8.monitor` samples to the next; its figures
            (:meth:`Monitor.summary`) go to the loggers of the Trainer. None samples nothing.

    Returns:
        The plugin. After the set-up its ``report`` and ``gathered`` say what was converted.

    Raises:
        ValueError: another precision, or ``health_every`` below 1.
        TypeError: ``health_every`` is neither an int nor None.
    """
    health = None if health_every is None else HealthOfSteps(health_every)
    return _plugin(TRAINER, precision, recipe=recipe, filter=filter, all_gather=all_gather, health=health)


def fabric_plugin(
    recipe: Any = "rowwise",
    precision: str = "bf16-mixed",
    filter: Any = None,
    all_gather: bool = False,
) -> Any:
    """A plugin for ``lightning.Fabric(plugins=[...])``; see :func:`trainer_plugin`."""
    return _plugin(FABRIC, precision, recipe=recipe, filter=filter, all_gather=all_gather)
