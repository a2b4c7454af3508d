"""Hugging Face's Trainer and accelerate: a callback that trains a model in FP8, and ``restore`` for saved models.

    from tritonfp8.integrations.transformers import Float8Callback

    trainer = Trainer(model, args, train_dataset=data, callbacks=[Float8Callback("rowwise")])

It also serves trainers that derive from Trainer, such as the TRL trainers.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

try:
    from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler
except ImportError as error:
    raise ImportError(
        "tritonfp8.integrations.transformers needs transformers and accelerate: pip install 'tritonfp8[integrations]'"
    ) from error

from tritonfp8.conversion import ConversionReport, bare, convert
from tritonfp8.distributed import enable_float8_all_gather
from tritonfp8.integrations.pretrained import from_pretrained as from_pretrained
from tritonfp8.integrations.quantizer import StoredWeightsConfig as StoredWeightsConfig
from tritonfp8.layers.linear import is_converted
from tritonfp8.layers.moe import is_converted_experts
from tritonfp8.recipes import Recipe
from tritonfp8.specs.naming import unwrapped
from tritonfp8.workflow import RecipeSchedule, SampledSteps, TrainingCheck, verify_training

CONFIG_KEY = "tritonfp8"
"""The entry of ``config.json`` that holds the recipes of a model."""

log = logging.getLogger("tritonfp8")
Stages = Sequence[tuple[int | str, str | Recipe]]


@dataclass(frozen=True)
class Float8Config:
    """How a Trainer's model is converted.

    Attributes:
        recipe: as for :func:`tritonfp8.convert`.
        filter: as for :func:`tritonfp8.convert`.
        all_gather: whether FSDP2 gathers weights in 8 bits. None: where accelerate shards the model by FSDP2.
        schedule: stages of a :class:`~tritonfp8.RecipeSchedule` over the steps of the training, instead of ``recipe``.
        verify: whether the first step with a learning rate above zero is checked by :func:`tritonfp8.verify_training`,
            which warns of weights that it does not move.
        health_every: optimizer steps from one step that :func:`tritonfp8.monitor` samples to the next; the Trainer logs
            its figures (:meth:`Monitor.summary`). None samples nothing.

    Raises:
        ValueError: ``health_every`` is below 1.
        TypeError: ``health_every`` is neither an int nor None.
    """

    recipe: Any = "rowwise"
    filter: Any = None
    all_gather: bool | None = None
    schedule: Stages | None = None
    verify: bool = True
    health_every: int | None = None

    def __post_init__(self) -> None:
        SampledSteps(self.health_every)


def uses_fsdp2() -> bool:
    """Whether accelerate shards models by FSDP2 in this process."""
    from accelerate.state import AcceleratorState

    return bool(AcceleratorState._shared_state) and bool(AcceleratorState().is_fsdp2)


def uses_deepspeed() -> bool:
    """Whether accelerate trains by DeepSpeed in this process."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    state = AcceleratorState._shared_state
    return state.get("distributed_type") == DistributedType.DEEPSPEED


def _require_whole_weights(model: nn.Module) -> None:
    """Refuse ZeRO-3 before the training: it leaves empty weights between the calls of a layer."""
    from accelerate.state import AcceleratorState

    if uses_deepspeed() and AcceleratorState().deepspeed_plugin.zero_stage == 3:
        raise ValueError(
            f"{type(model).__name__} would be sharded by DeepSpeed ZeRO-3, which is not supported: use ZeRO-1 or "
            "ZeRO-2, or FSDP2, which shards weights and gathers them in 8 bits"
        )


def _require_no_other_fp8() -> None:
    """Refuse ``mixed_precision="fp8"``, by which accelerate would replace the layers by another library's layers."""
    from accelerate.state import AcceleratorState

    if AcceleratorState._shared_state and AcceleratorState().mixed_precision == "fp8":
        raise ValueError(
            "accelerate was given mixed_precision='fp8', by which it converts the model with torchao, "
            "TransformerEngine or MS-AMP, and Float8Callback converts it with tritonfp8: set bf16=True "
            "(accelerate launch --mixed_precision bf16), or leave out the callback"
        )


def write_config(model: nn.Module) -> None:
    """Write the recipe of each converted layer into ``model.config``, which ``save_pretrained`` saves.

    Raises:
        TypeError: the model has no config.
    """
    config = getattr(model, "config", None)
    if config is None:
        raise TypeError(f"a model of transformers is needed, which has a config; got {type(model).__name__}")
    layers: dict[Recipe, list[str]] = {}
    for name, module in model.named_modules():
        if is_converted(module) or is_converted_experts(module):
            # Activation checkpointing puts a module around each layer, which is not saved.
            layers.setdefault(module.recipe, []).append(unwrapped(name))
    setattr(config, CONFIG_KEY, [{"recipe": r.to_dict(), "layers": names} for r, names in layers.items()])


def restore(model: nn.Module) -> ConversionReport:
    """Convert a model as it was converted when it was saved::

        model = restore(AutoModelForCausalLM.from_pretrained(path))

    Args:
        model: loaded by ``from_pretrained``. Its config has the recipe of each layer.

    Returns:
        The report of :func:`tritonfp8.convert`.

    Raises:
        ValueError: the config has no recipes, or names layers that the model does not have.
    """
    entries = getattr(getattr(model, "config", None), CONFIG_KEY, None)
    if not entries:
        raise ValueError(
            f"the model's config has no entry {CONFIG_KEY!r}: it was saved without Float8Callback. "
            "Use tritonfp8.convert(model, recipe)"
        )
    chosen = {name: Recipe.from_dict(e["recipe"]) for e in entries for name in e["layers"]}
    return convert(model, chosen)


class Float8Callback(TrainerCallback):
    """Trains a Trainer's model in FP8.

    When the Trainer is made, before it shards or compiles the model, the callback converts the model, enables the FP8
    all-gather where accelerate shards by FSDP2, and writes the recipes into ``model.config``. While it trains, the
    callback follows the schedule, if there is one, and checks that the first step moves every weight. It warns of
    gradients that are NaN or infinite: a loss that is NaN has such gradients, and the Trainer leaves it out of its log.

    With ``health_every=50`` every 50th optimizer step is sampled by :func:`tritonfp8.monitor`, and its figures go to
    the Trainer's reporters and to ``trainer.state.log_history``.

    Args:
        config: a :class:`Float8Config`, or its ``recipe``.
        health_every: as in :class:`Float8Config`, in which it takes the place of the field.

    Attributes:
        report: the report of :func:`tritonfp8.convert`; None before the Trainer is made.
        gathered: the report of :func:`tritonfp8.distributed.enable_float8_all_gather`; None without it.
    """

    def __init__(self, config: Float8Config | Any = "rowwise", health_every: int | None = None) -> None:
        config = config if isinstance(config, Float8Config) else Float8Config(recipe=config)
        self.config = config if health_every is None else replace(config, health_every=health_every)
        self.report: ConversionReport | None = None
        self.gathered: ConversionReport | None = None
        self.schedule: RecipeSchedule | None = None
        self._gradients = _FiniteGradients()
        self._steps = SampledSteps(self.config.health_every)
        self._check: TrainingCheck | None = None
        self._is_checked = not self.config.verify
        self._told_of_norm = False

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Convert the model."""
        inner = bare(model)
        _require_whole_weights(inner)
        _require_no_other_fp8()
        recipe = self.config.recipe
        if self.config.schedule is not None:
            # Shares of the training are resolved when it begins: only then its length is known.
            recipe = RecipeSchedule(self.config.schedule, total_steps=2**31).first_quantized
        if not any(is_converted(module) or is_converted_experts(module) for module in inner.modules()):
            self.report = convert(inner, recipe, self.config.filter)
            log.info("%s", self.report)
        gather = uses_fsdp2() if self.config.all_gather is None else self.config.all_gather
        if gather and not self._is_empty:
            self.gathered = enable_float8_all_gather(inner)
        if isinstance(inner, PreTrainedModel):
            write_config(inner)

    @property
    def _is_empty(self) -> bool:
        return self.report is not None and self.report.is_empty

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Begin the schedule, at the step at which the training begins or goes on."""
        # An error may have ended the last training in a sampled step.
        self._steps.close()
        if self.config.schedule is not None and not self._is_empty:
            self.schedule = RecipeSchedule(self.config.schedule, total_steps=state.max_steps)
            self.schedule.load_state_dict({"next_step": state.global_step})
            self.schedule.attach(bare(model))

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Give the model the recipe of this step, and sample it if it is its turn.

        DeepSpeed steps inside of the backward pass: its step is checked from here.
        """
        if uses_deepspeed() and not self._is_checked and _moves_weights(optimizer):
            self._begin_check(model, None)
        inner = bare(model)
        if self.schedule is not None:
            before = self.schedule.recipe_at(max(0, state.global_step - 1))
            if self.schedule.step(state.global_step) != before and isinstance(inner, PreTrainedModel):
                write_config(inner)
        if not self._is_empty:
            self._steps.begin(inner, state.global_step)

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Look at the gradients of this step, and begin the check of the first."""
        if uses_deepspeed():
            norm = getattr(optimizer.optimizer, "_global_grad_norm", None)
            if norm is None and not self._told_of_norm:
                self._told_of_norm = True
                log.warning(
                    "DeepSpeed's %s gives no norm of the gradients, so steps whose gradients are NaN or infinite are "
                    'not reported. Remove "compute_grad_norm": false from zero_optimization to have them reported.',
                    type(optimizer.optimizer).__name__,
                )
            self._gradients.add(norm)
            return
        self._gradients.see(model)
        if not self._is_checked and _moves_weights(optimizer):
            self._begin_check(model, optimizer)

    def _begin_check(self, model: nn.Module, optimizer: Any) -> None:
        self._is_checked = True
        self._check = verify_training(bare(model), optimizer, on_failure="warn")
        self._check.__enter__()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the check of the first step."""
        if self._check is not None:
            self._check.__exit__(None, None, None)
            self._check = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Log the figures of a sampled step."""
        if figures := self._steps.end():
            _report(figures, args, state, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave no hooks of a step that did not end."""
        self._steps.close()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Warn of steps whose gradients were not finite."""
        if steps := self._gradients.take():
            log.warning(
                "%d of the last steps before step %d had gradients that are NaN or infinite. The Trainer leaves the "
                "losses of such steps out of its log.",
                steps, state.global_step,
            )  # fmt: skip


def _report(
    figures: dict[str, float | str], args: TrainingArguments, state: TrainerState, control: TrainerControl
) -> None:
    """Log figures as ``Trainer.log`` does, to each reporter and into the history.

    A callback is given neither the Trainer nor the reporters, which are called before it in ``on_log``. So it asks the
    handler that called it. ``handler.on_log`` would take back that the Trainer is to log this step.
    """
    frame = inspect.currentframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), CallbackHandler):
        frame = frame.f_back
    logs: dict[str, Any] = figures if state.epoch is None else {**figures, "epoch": state.epoch}
    state.log_history.append({**logs, "step": state.global_step})
    if frame is not None:
        frame.f_locals["self"].call_event("on_log", args, state, control, logs=logs)


def _moves_weights(optimizer: Any) -> bool:
    """Whether a step of this optimizer should move every weight: not while the learning rate warms up from zero, and
    not with a scaler of gradients, which leaves out steps.
    """
    groups = getattr(optimizer, "param_groups", None)
    if not groups or getattr(optimizer, "scaler", None) is not None:
        return False
    return all(float(group.get("lr", 1.0)) > 0 for group in groups)


class _FiniteGradients:
    """Counts the steps whose gradients are not finite, on the device: nothing waits for it before :meth:`take`."""

    def __init__(self) -> None:
        self._count: Tensor | None = None

    def see(self, model: nn.Module) -> None:
        """Count this step.

        Vectors are enough, and take little time: a NaN in the loss reaches the gradient of every norm and bias.
        """
        found = [p.grad for p in model.parameters() if p.grad is not None]
        vectors = [grad for grad in found if grad.ndim <= 1] or found[:1]
        local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in vectors]
        if local:
            self.add(torch.nn.utils.get_total_norm(local))

    def add(self, norm: Tensor | float | None) -> None:
        """Count a step by the norm of its gradients; None is no step."""
        if norm is not None:
            wrong = (~torch.as_tensor(norm).isfinite()).long()
            self._count = wrong if self._count is None else self._count + wrong

    def take(self) -> int:
        """The number of steps since the last call."""
        count, self._count = self._count, None
        return 0 if count is None else int(count)
