"""Train the contestants of ``bench.distributed`` on the same text, one at a time.

Each contestant has the processes to itself, as a user's model does.
"""

import copy
import gc
import itertools
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._inductor.config as inductor
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from bench.contest.compare import rounded
from bench.distributed.models import (
    WAYS,
    Contestant,
    Meshes,
    attend_causally,
    clip_gradients,
    fsdp_contestants,
    spread,
    tp_contestants,
)  # fmt: skip
from bench.distributed.ranks import AllFailedError, Ranks
from bench.models import sums_of
from tritonfp8 import recipes
from tritonfp8.distributed import count_collective_bytes
from tritonfp8.layers.stored import stored_part
from tritonfp8.optim import AdamW
from tritonfp8.specs.checks import require
from tritonfp8.training import UNTIMED_STEPS, build_model, corpus, default_lr, lr_factor, require_train_extra, timers

ORDER = "one after the other"
MOMENTS = ("fp32", "bf16", "fp8")
Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """Settings of a comparison.

    Attributes:
        model: a name of :data:`tritonfp8.training.models.MODELS`, or the path of a Llama config.
        recipes: recipes of this package that quantize.
        steps: optimizer steps of each contestant.
        lr: peak learning rate of AdamW, or None for the model's.
        moments: formats of moments of contestants whose weights are stored in 8 bits (:mod:`tritonfp8.optim`).
        rounds: how often each contestant runs; its fastest round counts. Other load on the host slows some rounds.
        batch_size: sequences per step and data-parallel rank.
        seq_len: tokens (bytes of text) per sequence.
        dp, tp: number of data-parallel and of tensor-parallel ranks.
        compile: whether each decoder layer is compiled.
        peers: whether torchao takes part.
        losses: compare losses, not speeds: deterministic, with controls.
        seed: seed of the weights and of the choice of text.
        data: file or folder of text, or None for the standard library's sources.
        ways: of tensor parallelism: names of :data:`WAYS`.
        find_unchanged: whether rows name what no step changed on each rank; weight decay, which changes all, is off.
    """

    model: str
    recipes: tuple[str, ...]
    steps: int
    batch_size: int
    seq_len: int
    dp: int
    tp: int = 1
    compile: bool = False
    peers: bool = True
    losses: bool = False
    seed: int = 0
    data: str | None = None
    lr: float | None = None
    rounds: int = 1
    moments: tuple[str, ...] = ()
    ways: tuple[str, ...] = tuple(WAYS)
    find_unchanged: bool = False

    def __post_init__(self) -> None:
        self.peak_lr()
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive and finite; got {self.lr}")
        if self.losses and self.rounds != 1:
            raise ValueError(f"rounds are for speeds, and losses are the same in each; got {self.rounds} rounds")
        for name in self.recipes:
            if not recipes.get(name).output.quantized:
                raise ValueError(f"bf16 takes part anyway; give recipes that quantize, not {name!r}")
        for name in self.ways:
            require("ways", name, tuple(WAYS))
        for name in self.moments:
            require("moments", name, MOMENTS)
        if self.moments and self.tp > 1:
            raise ValueError(f"stored weights are compared under FSDP2 only; got tp={self.tp}")
        if self.seq_len % self.tp:
            raise ValueError(f"seq_len must be a multiple of tp, {self.tp}; got {self.seq_len}")

    def contestants(self) -> list[Contestant]:
        """All contestants, bf16 first."""
        if self.tp > 1:
            return tp_contestants(self.recipes, self.losses, self.ways)
        return fsdp_contestants(self.recipes, self.peers, self.losses, self.moments)

    def peak_lr(self) -> float:
        """``lr``, or the learning rate of the model. Raises ValueError for an unknown model."""
        own = default_lr(self.model)
        return own if self.lr is None else self.lr

    def maker(self, device: torch.device) -> Callable[[], nn.Module]:
        """A function that makes the model on ``device``, with the same initial float32 weights in every call."""
        model = build_model(self.model, self.seq_len, self.seed)
        return lambda: copy.deepcopy(model).to(device)


@dataclass(frozen=True)
class Job:
    """The common start of all contestants on this rank.

    Attributes:
        settings: the settings.
        device: the device of this rank.
        make_model: makes the model with its initial weights, float32, on the device.
        batches: the whole batch of each step, uint8 ``[dp * batch_size, seq_len + 1]``, and of one more step.
        meshes: the device meshes.
    """

    settings: Settings
    device: torch.device
    make_model: Callable[[], nn.Module]
    batches: tuple[torch.Tensor, ...]
    meshes: Meshes

    @classmethod
    def make(cls, settings: Settings, device: torch.device) -> "Job":
        """Load text and model. Collective."""
        require_train_extra()
        if device.type == "cuda":
            # The first GEMM allocates cuBLAS's workspace: run one before any contestant is timed.
            torch.ones(16, 16, device=device, dtype=torch.bfloat16).mm(torch.ones(16, 16, device=device).bfloat16())
        text = corpus.load(settings.data)
        sizes = {"batch_size": settings.dp * settings.batch_size, "seq_len": settings.seq_len, "seed": settings.seed}
        batches = tuple(b.to(device) for b in corpus.batches(text, steps=settings.steps + 1, **sizes))
        meshes = Meshes.make(device.type, settings.dp, settings.tp, settings.losses and settings.tp > 1)
        return cls(settings, device, settings.maker(device), batches, meshes)


def _on_this_rank(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


class Training:
    """One contestant's model, sharded, and its optimizer."""

    def __init__(self, job: Job, contestant: Contestant) -> None:
        settings = job.settings
        self.model = job.make_model().train()
        attend_causally(self.model)
        contestant.convert(self.model)
        spread(self.model, contestant, job.meshes, settings.compile)
        self.positions = torch.arange(settings.seq_len, device=job.device)[None]
        self.after_step, self.parts = contestant.after_step, job.meshes.tp if contestant.experts else None
        first = 0 if contestant.alone else job.meshes.dp.get_local_rank() * settings.batch_size
        self.part = slice(first, None if contestant.alone else first + settings.batch_size)
        parameters = list(self.model.parameters())
        decay = 0.0 if settings.find_unchanged else 0.1
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        options: dict[str, Any] = {"lr": settings.peak_lr(), "betas": (0.9, 0.95), "fused": True}
        self.optimizer = (
            torch.optim.AdamW(groups, **options)
            if contestant.moments is None
            else AdamW(groups, **options, moments=contestant.moments, seed=settings.seed)
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: lr_factor(step, settings.steps))

    def linear_bytes(self) -> tuple[int, int]:
        """Bytes of weights and optimizer state on this rank, and elements on all ranks, of the linear layers."""
        size = count = 0
        for layer in self.model.modules():
            if isinstance(layer, nn.Linear):
                weight: torch.Tensor = layer.weight
                part = stored_part(weight)
                kept = [weight if part is None else part, *self.optimizer.state[weight].values()]
                size += sum(_on_this_rank(x).nbytes for x in kept if isinstance(x, torch.Tensor))
                count += weight.numel()
        return size, count

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """One optimizer step on this rank's part of the batch; returns its mean loss, in nats a byte."""
        batch = batch[self.part].long()
        logits = self.model(input_ids=batch[:, :-1], position_ids=self.positions, use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        clip_gradients(self.model, 1.0, self.parts)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        self.after_step(self.model)
        return loss.detach()


@dataclass
class Measured:
    """A contestant and its measurements on this rank.

    Attributes:
        contestant: the contestant.
        losses: loss of each step, on this rank's part of the batch.
        seconds: seconds of each step.
        peak_bytes: peak of allocated bytes, or None on a CPU.
        bytes, calls: collectives of one step, by kind (:class:`~tritonfp8.distributed.count_collective_bytes`).
        linear_bytes: bytes of weights and optimizer state of the linear layers on this rank, and their elements.
        sums, unchanged: sums of parameters before the first step, and names of parameters that no step changed here.
        reason: why it was not measured, or not completely.
        training: the running model, or None before the start and after the end.
    """

    contestant: Contestant
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    bytes: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    linear_bytes: tuple[int, int] = (0, 0)
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    unchanged: list[str] = field(default_factory=list)
    reason: str | None = None
    training: Training | None = None

    def start(self, job: Job) -> None:
        """Build the model, and run the untimed steps."""
        self.training = Training(job, self.contestant)
        if job.settings.find_unchanged:
            self.sums = sums_of(self.training.model)
        self.run(job, untimed_steps(job.settings))

    def run(self, job: Job, count: int) -> None:
        """Run the next ``count`` steps."""
        assert self.training is not None
        done = len(self.losses)
        if job.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(job.device)
        times, losses = [timers.now(job.device)], []
        for batch in job.batches[done : done + count]:
            losses.append(self.training.step(batch))
            times.append(timers.now(job.device))
        self.losses += torch.stack(losses).tolist() if losses else []
        self.seconds += itertools.starmap(timers.seconds_between, itertools.pairwise(times))
        if job.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(job.device)
            # Memory of compilation and tuning in the untimed steps does not count.
            self.peak_bytes = peak if done < untimed_steps(job.settings) else max(peak, self.peak_bytes or 0)

    def count(self, job: Job) -> None:
        """Run one more step to count its collectives. Last, because counting may change compiled code."""
        assert self.training is not None
        self.linear_bytes = self.training.linear_bytes()
        with count_collective_bytes() as traffic:
            self.training.step(job.batches[job.settings.steps])
        self.bytes, self.calls = dict(traffic.bytes), dict(traffic.calls)
        after = sums_of(self.training.model) if self.sums else {}
        self.unchanged = [name for name, sums in self.sums.items() if sums == after[name]]


def untimed_steps(settings: Settings) -> int:
    """Number of first steps that do not count for speed, because they compile and fill the allocator."""
    return min(UNTIMED_STEPS, max(settings.steps - 1, 1))


def free(device: torch.device) -> None:
    """Free the memory of a contestant before the next one; reference cycles keep it alive."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def compare(
    settings: Settings, ranks: Ranks, device: torch.device, note: Callable[[str, list[Row]], None],
    contestants: Sequence[Contestant] | None = None,
) -> tuple[str, list[Row]]:  # fmt: skip
    """Measure all contestants. Collective: every rank calls it with the same settings and gets the same result.

    Args:
        settings, ranks, device: of this run; all ranks of it, and the device of this one.
        note: called with the result so far after each contestant.
        contestants: instead of the contestants of ``settings``.

    Returns:
        A description of the order in which contestants ran, and a row for each (:func:`row`).

    Raises:
        AllFailedError: the model or the text cannot be loaded.
        RankError: some ranks failed and others did not; nothing more can run.
    """
    if settings.losses:
        make_deterministic()
    job = ranks.together(lambda: Job.make(settings, device))
    rows: list[Row] = []
    for _ in range(settings.rounds):
        for index, contestant in enumerate(contestants or settings.contestants()):
            entry = Measured(contestant, reason=contestant.obstacle)
            _phase(ranks, job, entry, Measured.start)
            _phase(ranks, job, entry, Measured.run, settings.steps - untimed_steps(settings))
            _phase(ranks, job, entry, Measured.count)
            entry.training = None
            torch.compiler.reset()
            free(device)
            found = row(settings, entry, ranks)
            rows[index : index + 1] = [faster(*rows[index : index + 1], found)]
            note(ORDER, rows)
    return ORDER, rows


def faster(*rounds: Row) -> Row:
    """The row of the fastest round, with the seconds of all rounds; if a round failed, the row of that round."""
    seconds = [x for each in rounds for x in each.get("round_seconds", [each["seconds"]])]
    failed = next((each for each in rounds if "reason" in each), None)
    best = failed or min(rounds, key=lambda each: each["seconds"] or 0.0)
    return {**best, "round_seconds": seconds}


def make_deterministic() -> None:
    """Make torch's own backward passes deterministic. An op without a deterministic version raises an error.

    With a warning only, attention's backward stays nondeterministic.
    """
    # cuBLAS reads this when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    # Inductor must not choose kernels by measured speed, and fused kernels must round as eager ones do. Some versions
    # of torch lack these options.
    for option in ("deterministic", "emulate_precision_casts"):
        if hasattr(inductor, option):
            setattr(inductor, option, True)


def _phase(ranks: Ranks, job: Job, entry: Measured, what: Callable[..., None], *args: int) -> None:
    """Run a phase of a contestant unless it has failed. If it fails on all ranks, the comparison goes on without it."""
    if entry.reason is not None:
        return
    try:
        ranks.together(lambda: what(entry, job, *args))
    except AllFailedError as error:
        entry.reason, entry.training = str(error), None
    if entry.reason is not None:
        # Only here, outside ``except``: the error kept the model alive.
        free(job.device)


def as_json(x: float) -> float | str:
    """``x``, or as text if it is NaN or infinite, which JSON cannot store; ``float`` reads both."""
    return x if math.isfinite(x) else str(x)


def row(settings: Settings, entry: Measured, ranks: Ranks) -> Row:
    """The measurements of a contestant on all ranks. Collective.

    Seconds are the median step of the slowest rank; memory and bytes are from the rank with the most. A comparison
    of losses has no seconds, because training does not use deterministic kernels.
    """
    seconds = [] if settings.losses else entry.seconds
    timed = seconds[untimed_steps(settings) :]
    own = (
        statistics.median(timed) if timed else None, entry.peak_bytes, entry.bytes, entry.calls, entry.losses,
        entry.linear_bytes, entry.unchanged,
    )  # fmt: skip
    medians, peaks, traffic, calls, losses, kept, unchanged = zip(*ranks.exchange(own), strict=True)
    contestant = entry.contestant
    found: Row = {
        "contender": contestant.name,
        "over": contestant.baseline,
        "own": contestant.own,
        "seconds": None if None in medians else rounded(max(medians)),
        "peak_bytes": None if None in peaks else max(peaks),
        "bytes": {kind: max(each.get(kind, 0) for each in traffic) for kind in traffic[0]},
        "calls": {kind: max(each.get(kind, 0) for each in calls) for kind in calls[0]},
        "losses": [list(map(as_json, each)) for each in losses],
        "step_seconds": [rounded(x) for x in seconds],
    }
    if elements := kept[0][1]:
        found["bytes_a_linear_parameter"] = rounded(sum(size for size, _ in kept) / elements)
    if settings.find_unchanged:
        found["unchanged"] = list(unchanged)
    if found["seconds"] is not None:
        tokens = settings.dp * settings.batch_size * settings.seq_len
        found["tokens_per_second"] = rounded(tokens / found["seconds"])
    if entry.reason is not None:
        found["reason"] = f"not measured: {entry.reason}"
    return found
