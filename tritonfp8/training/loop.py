"""Train one model on the same text in several recipes, and measure losses, times, memory and FLOPs.

Every recipe starts from the same weights and sees the same batches in the same order. The loop is ordinary
mixed-precision training: float32 weights, bfloat16 autocast, AdamW (betas 0.9 and 0.95, weight decay 0.1 on matrices),
linear warm-up over the first tenth of the steps (at most 100), cosine decay to a tenth of the learning rate, gradients
clipped to norm 1. ``bf16`` is the unconverted model. ``bf16-perturbed`` is the same model from weights changed by about
their bf16 rounding. For every other recipe, :func:`tritonfp8.convert` converts a copy.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from tritonfp8.compat.counting import count_gemms
from tritonfp8.conversion import convert
from tritonfp8.layers.moe import computing_class
from tritonfp8.specs.checks import first_line
from tritonfp8.training import corpus, timers
from tritonfp8.training.models import perturb
from tritonfp8.training.settings import BASELINE, PERTURBED, Job, Settings

UNTIMED_STEPS = 5
MAX_HELD_OUT_WINDOWS = 256
_POLL_STEPS = 10
# One CPU thread for each of these FLOPs in a step: threads that share ops of microseconds wait for each other longer
# than they work, as soon as the machine is busy with anything else.
FLOPS_A_THREAD = 10**10
_STATES = ("model", "optimizer", "lr")


@dataclass
class Run:
    """The measurements of one recipe.

    Attributes:
        recipe: name of the recipe.
        losses: mean cross-entropy of each step's batch, in nats a byte.
        held_out_loss: mean cross-entropy on held-out text after the last step, in nats a byte; None if there is no
            such text, or the last step did not end.
        step_seconds: wall time of each step; on a GPU, time between events on its stream.
        peak_bytes: peak of allocated GPU memory over the timed steps, weights and optimizer included; None on a CPU.
        flops: FLOPs of the GEMMs of converted layers, by kind (:data:`tritonfp8.compat.counting.KINDS`).
        converted: recipe of each converted layer, by its name in the model.
        skipped: for each layer that was not converted, the reason, by its name in the model.
        failure: the error that ended this recipe, or None.
        details: traceback of the failure.
        interrupted: whether the user stopped it.
    """

    recipe: str
    losses: list[float] = field(default_factory=list)
    held_out_loss: float | None = None
    step_seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    flops: dict[str, int] = field(default_factory=dict)
    converted: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    failure: str | None = None
    details: str | None = None
    interrupted: bool = False

    @property
    def untimed_steps(self) -> int:
        """Steps at the start that are excluded from speeds: they compile, warm up caches and fill the allocator."""
        return min(UNTIMED_STEPS, max(len(self.step_seconds) - 1, 0))

    @property
    def median_step_seconds(self) -> float | None:
        """Median wall time of a step after the first :attr:`untimed_steps`; None if no step ended."""
        timed = self.step_seconds[self.untimed_steps :]
        return statistics.median(timed) if timed else None

    @property
    def first_non_finite(self) -> int | None:
        """Number (from 1) of the first step whose loss is NaN or infinite, or None."""
        return next((step for step, loss in enumerate(self.losses, 1) if not math.isfinite(loss)), None)


@dataclass
class Result:
    """All measurements of one comparison.

    Attributes:
        job: the settings, text and model.
        linear_flops: FLOPs of all linear layers in one training step of the unconverted model; None if the run ended
            before they were counted.
        threads: threads that an op may use on the CPU.
        runs: one Run for each recipe that was started, in the order of the settings.
        interrupted: whether the user stopped it.
    """

    job: Job
    linear_flops: int | None = None
    threads: int | None = None
    runs: list[Run] = field(default_factory=list)
    interrupted: bool = False

    def run_of(self, recipe: str) -> Run | None:
        """The run of this recipe, or None if it was not started."""
        return next((run for run in self.runs if run.recipe == recipe), None)


class RunObserver:
    """Receives the progress of a comparison. This class does nothing; derive from it."""

    def started(self, recipe: str, steps: int) -> None:
        """A recipe begins."""

    def stepped(self, step: int, loss: float, tokens_per_second: float) -> None:
        """``step`` steps are done, at this speed since the last call. On a GPU it is not called for every step."""

    def trained(self, job: Job, run: Run, model: nn.Module) -> None:
        """``run`` took all its steps, and is measured; ``model`` is freed after this call."""

    def ended(self, result: Result) -> None:
        """The last recipe of ``result`` has ended: by its last step, a failure or the user."""


def run(job: Job, observer: RunObserver | None = None) -> Result:
    """Train in every recipe of the job. Measurements up to an error or interruption are in the result.

    KeyboardInterrupt ends the comparison; an error ends only its recipe. The :class:`Run` of that recipe records both.
    Losses are reproducible on the CPU; on a GPU, as far as torch's own backward passes are.
    """
    observer = observer or RunObserver()
    result = Result(job)
    device, threads = torch.device(job.settings.device), torch.get_num_threads()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        result.linear_flops = linear_flops(job)
        if device.type == "cpu":
            torch.set_num_threads(min(threads, max(1, result.linear_flops // FLOPS_A_THREAD)))
        result.threads = torch.get_num_threads()
        for recipe in job.settings.recipes:
            result.runs.append(Run(recipe))
            observer.started(recipe, job.settings.steps)
            _train(job, result.runs[-1], observer)
            observer.ended(result)
            if result.runs[-1].interrupted:
                break
    except KeyboardInterrupt:
        result.interrupted = True
    finally:
        torch.set_num_threads(threads)
    result.interrupted |= any(each.interrupted for each in result.runs)
    return result


def linear_flops(job: Job) -> int:
    """FLOPs (2 M N K a GEMM) of all linear layers and experts of the unconverted model in one training step.

    Torch counts them in an eager forward and backward of one sequence on the job's device; the result is multiplied by
    the batch size. GEMMs with a batch dimension belong to attention and are not counted.
    """
    settings = job.settings
    device = torch.device(settings.device)
    model = copy.deepcopy(job.model).to(device).train()
    # torch has no formula for the grouped GEMMs that models call themselves.
    _run_experts_in_bf16(model)
    batch = torch.zeros(1, settings.seq_len + 1, dtype=torch.long, device=device)
    gemms = torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.tritonfp8.grouped_matmul
    # torch's formulas of attention refuse grouped queries.
    others: dict[Any, Callable[..., int]] = {op: lambda *_, **__: 0 for op in flop_registry if op not in gemms}
    with FlopCounterMode(display=False, custom_mapping=others) as counter:
        next_token_loss(model, batch).backward()
    counts = counter.get_flop_counts()["Global"]
    total = sum(counts.get(op, 0) for op in gemms) * settings.batch_size
    del model
    _release(settings)
    return int(total)


def next_token_loss(model: nn.Module, batch: torch.Tensor, autocast: bool = True) -> torch.Tensor:
    """Mean cross-entropy of next-token prediction.

    Args:
        model: a causal language model; returns ``.logits``, ``[batch, seq_len, vocabulary]``.
        batch: int64 ``[batch, seq_len + 1]``.
        autocast: whether bfloat16 autocast is on.
    """
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=autocast):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def held_out_loss(job: Job, model: nn.Module) -> float | None:
    """Mean loss of ``model`` over held-out text: a tenth of the sequences trained on, at most 256; None without text.

    The forward pass is eager: torch would compile another graph for a pass without gradients.
    """
    settings = job.settings
    count = min(MAX_HELD_OUT_WINDOWS, max(1, settings.steps * settings.batch_size // 10))
    sizes = {"count": count, "batch_size": settings.batch_size, "seq_len": settings.seq_len}
    total, sequences = torch.zeros((), dtype=torch.float64), 0
    with torch.no_grad():
        for batch in corpus.windows(job.text.held_out, **sizes):
            total += len(batch) * next_token_loss(model, batch.to(settings.device).long()).double().cpu()
            sequences += len(batch)
    return total.item() / sequences if sequences else None


class _Meter:
    """Records each finished step without waiting for the GPU; an interrupted step is not recorded."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: list[tuple[torch.Tensor, Any, Counter[str]]] = []
        self.begin: Any = None

    def start(self) -> None:
        """Record the begin of the first step."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.begin = timers.now(self.device)

    def add(self, loss: torch.Tensor, flops: Counter[str]) -> None:
        """Record a step that has been launched, with its loss and FLOPs."""
        self.steps.append((loss, timers.now(self.device), flops))
        if len(self.steps) == UNTIMED_STEPS and self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def read(self, run: Run) -> None:
        """Wait for the device, and write the records into ``run``."""
        if not self.steps or self.begin is None:
            return
        run.losses = torch.stack([loss for loss, _, _ in self.steps]).tolist()
        times = [self.begin, *(time for _, time, _ in self.steps)]
        run.step_seconds = list(itertools.starmap(timers.seconds_between, itertools.pairwise(times)))
        run.flops = dict(sum((flops for _, _, flops in self.steps), Counter()))
        run.peak_bytes = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None


def _train(job: Job, run: Run, observer: RunObserver) -> None:
    """Train one recipe into ``run``; an error or a KeyboardInterrupt ends it and is recorded there."""
    meter = _Meter(torch.device(job.settings.device))
    with _recorded(run):
        model = _converted_copy(job, run)
        _loop(job, model, meter, observer)
    # After a CUDA error, reading fails too; it is caught, so that the other recipes' figures are kept.
    with _recorded(run):
        meter.read(run)
        if len(run.losses) == job.settings.steps:
            run.held_out_loss = held_out_loss(job, model)
            observer.trained(job, run, model)
    with _recorded(run):
        del model
        _release(job.settings)


@contextlib.contextmanager
def _recorded(run: Run) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        run.interrupted = True
    except Exception as error:
        if run.failure is None:
            run.failure = first_line(error)
            run.details = traceback.format_exc()


def _converted_copy(job: Job, run: Run) -> nn.Module:
    model = copy.deepcopy(job.model).to(job.settings.device).train()
    if run.recipe == PERTURBED:
        perturb(model, job.settings.seed)
    if run.recipe not in (BASELINE, PERTURBED):
        report = convert(model, run.recipe)
        run.converted = {name: recipe.name for name, recipe in report.converted.items()}
        run.skipped = dict(report.skipped)
    else:
        _run_experts_in_bf16(model)
    return model


def _run_experts_in_bf16(model: nn.Module) -> None:
    """Let experts compute in autocast's dtype, which transformers' experts ignore, by grouped GEMMs."""
    if any(computing_class(module) is not None for module in model.modules()):
        convert(model, BASELINE, filter=lambda module, name: computing_class(module) is not None)


def _loop(job: Job, model: nn.Module, meter: _Meter, observer: RunObserver) -> None:
    settings, device = job.settings, meter.device
    step = TrainingStep(model, settings)
    sizes = {name: getattr(settings, name) for name in ("steps", "batch_size", "seq_len", "seed")}
    polled, since = 0, time.perf_counter()
    meter.start()
    for done, batch in enumerate(corpus.batches(job.text, **sizes), 1):
        with count_gemms() as counts:
            loss = step(batch.to(device, non_blocking=True).long())
        meter.add(loss, counts.flops)
        # Not in every step on a GPU: reading a loss waits for the GPU.
        if device.type == "cpu" or done % _POLL_STEPS == 0 or done == settings.steps:
            value, now = loss.item(), time.perf_counter()
            observer.stepped(done, value, (done - polled) * settings.batch_size * settings.seq_len / (now - since))
            polled, since = done, now


class TrainingStep:
    """One optimizer step on a batch (int64 ``[batch, seq_len + 1]``), and the state that a checkpoint needs for it."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
        vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.model = model
        self.optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True)
        self.lr = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: lr_factor(step, settings.steps))
        self._loss = torch.compile(next_token_loss) if settings.compile else next_token_loss
        torch.manual_seed(settings.seed)

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        """Take one step, and return the loss of the batch."""
        loss = self._loss(self.model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.lr.step()
        return loss.detach()

    def state_dict(self) -> dict[str, Any]:
        """State of the model, the optimizer and the learning rate."""
        return {name: getattr(self, name).state_dict() for name in _STATES}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        for name in _STATES:
            getattr(self, name).load_state_dict(state[name])


def lr_factor(step: int, steps: int) -> float:
    """Learning rate of ``step`` (from 0) of ``steps``, as a share of the peak: linear warm-up, then cosine to 0.1."""
    warm_up = min(100, max(1, steps // 10))
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


def _release(settings: Settings) -> None:
    """Free what would affect the next recipe: memory, compiled code, and Dynamo's records of dynamic shapes."""
    if settings.compile:
        torch.compiler.reset()
    gc.collect()
    if torch.device(settings.device).type == "cuda":
        torch.cuda.empty_cache()
