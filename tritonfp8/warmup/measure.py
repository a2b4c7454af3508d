"""Measure which configuration is fastest for each GEMM of a model, and save it for :mod:`tritonfp8.tuning`.

Only :func:`tune` measures; a training step never does.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

import tritonfp8
from tritonfp8 import tuning
from tritonfp8.compat import hardware
from tritonfp8.specs.checks import first_line
from tritonfp8.specs.testing import FAST_TOLERANCE, assert_matmul_close, sqnr, worst_tile_sqnr
from tritonfp8.training import timers
from tritonfp8.tuning import Entries, Entry, Key, MatmulConfig, find, store
from tritonfp8.warmup.gemms import AnyGemm, gemm_of
from tritonfp8.warmup.record import Call
from tritonfp8.warmup.workers import default_workers, run_jobs

ROUNDS = 25
# Larger than any L2. Flushed several times, so that the GPU is busy until the host has launched the function:
# otherwise the host's time would be measured.
FLUSH_BYTES, FLUSHES = 2**28, 8
# Large GEMMs reach the GPU's power limit, and its clocks follow the load of the last tenths of a second. So functions
# that are nearly the fastest run for so long before their time counts: one that takes less power gains.
SETTLING_SECONDS, SETTLED_RUNS, SETTLED_ROUNDS = 0.2, 10, 4
NEARLY = 1.2
# Before a shorter function, the flush takes longer than the function, and no clocks fall.
SHORT_SECONDS = 1e-4
CHECKED_ROWS = 1024

Timer = Callable[[Sequence[Callable[[], object]]], Sequence[float]]
"""Takes functions, returns the seconds that each one takes."""


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make ``device`` the current device in the ``with`` block: Triton launches on it."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@dataclass(frozen=True)
class OpJob:
    """Run a call once, on zeros, which compiles its kernels.

    Attributes:
        call: the op and its arguments.
        config: for a GEMM, the name of the configuration to run it in; None leaves the choice to the launch.
    """

    call: Call
    config: str | None = None

    def run(self, device: torch.device) -> None:
        """Run it and wait for it."""
        args = self.call.arguments(device)
        if self.config is None:
            self.call.overload(*args)
        else:
            gemm = gemm_of(self.call, device)
            assert gemm is not None
            config = find(gemm.key.kind, self.config)
            assert config is not None
            gemm.run(args, config)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            # Other workers on this GPU need the memory.
            torch.cuda.empty_cache()


def distinct_gemms(calls: Sequence[Call], device: torch.device) -> list[AnyGemm]:
    """The GEMMs among ``calls``, one for each key; those without a configuration, such as empty ones, are left out."""
    found: dict[Key, AnyGemm] = {}
    for call in calls:
        gemm = gemm_of(call, device)
        if gemm is not None:
            found.setdefault(gemm.key, gemm)
    return list(found.values())


def cuda_seconds(functions: Sequence[Callable[[], object]], rounds: int = ROUNDS) -> list[float]:
    """Median seconds of each function on the current GPU, with L2 flushed before each run.

    Long functions that are nearly the fastest are measured again at the clocks of training; the others take infinitely
    long then.
    """
    seconds = cool_seconds(functions, rounds)
    fastest = min(seconds)
    near = [i for i, each in enumerate(seconds) if each <= NEARLY * fastest]
    if fastest < SHORT_SECONDS or len(near) == 1:
        return seconds
    settled = dict(zip(near, settled_seconds([functions[i] for i in near]), strict=True))
    return [settled.get(i, math.inf) for i in range(len(seconds))]


def settled_seconds(functions: Sequence[Callable[[], object]]) -> list[float]:
    """Median seconds of each function, run in a row for so long that the clocks settle, in several rounds.

    Every other round runs in reverse: a function begins at the clocks that the one before it has left.
    """
    flushed = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    seconds: list[list[float]] = [[] for _ in functions]
    turns = list(zip(functions, seconds, strict=True))
    for _ in range(SETTLED_ROUNDS):
        for function, found in turns:
            found += timers.settled_seconds(function, SETTLED_RUNS, SETTLING_SECONDS, flushed.zero_)
        turns.reverse()
    return list(map(statistics.median, seconds))


def cool_seconds(functions: Sequence[Callable[[], object]], rounds: int = ROUNDS) -> list[float]:
    """Median seconds of each function while the GPU rests in between, with L2 flushed before each run.

    This is GPU time only, if the host calls a function in less than half a millisecond (on a GPU of 4 TB/s). All
    functions run in each round, and each round begins with another one, because a GPU slows down as it warms up.
    """
    flushed = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def flush() -> None:
        for _ in range(FLUSHES):
            flushed.zero_()

    for function in functions:
        function()
    count = len(functions)
    order = [(first + offset) % count for first in range(rounds) for offset in range(count)]
    seconds: list[list[float]] = [[] for _ in functions]
    for i, each in zip(order, timers.gpu_seconds([functions[i] for i in order], flush), strict=True):
        seconds[i].append(each)
    return list(map(statistics.median, seconds))


@dataclass(frozen=True)
class Tuned:
    """The result of :func:`tune`.

    Attributes:
        entries: the configurations measured in this call, by key.
        skipped: number of GEMMs that these versions had tuned before.
        failed: errors, one line each.
        interrupted: whether Ctrl-C ended the call; the entries are saved.
    """

    entries: Entries
    skipped: int
    failed: tuple[str, ...]
    interrupted: bool = False


def tune(
    calls: Sequence[Call],
    device: torch.device | str = "cuda",
    *,
    force: bool = False,
    workers: int | None = None,
    timer: Timer | None = None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Tuned:
    """Measure the GEMMs among ``calls``; this process and later ones then launch the fastest configurations.

    Each GEMM runs in its most promising configurations, compiled in parallel, on random normal data. A configuration
    whose output is not within the tolerances (:mod:`tritonfp8.specs.testing`) is not timed. The fastest is saved before
    the next GEMM is measured.

    Args:
        calls: the calls of a step, from :func:`tritonfp8.warmup.record.record_model` or ``record_linear``.
        device: the device to measure on.
        force: measure again GEMMs that these versions of triton and tritonfp8 have measured.
        workers: processes that compile; None for one a core, at most 8; 0 to compile in this process.
        timer: replaces :func:`cuda_seconds`.
        progress: called with the number of finished steps and of all steps.

    Raises:
        RuntimeError: a CUDA graph is being captured.
        ValueError: a device other than a GPU, without a ``timer``.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "tuning cannot run while a CUDA graph is captured: tune before it, with tritonfp8 warmup --tune"
        )
    if timer is None and torch.device(device).type != "cuda":
        raise ValueError(f"tuning times kernels and needs a CUDA GPU, or a timer; got device {str(device)!r}")
    device = hardware.with_index(device)
    machine = hardware.machine_key(hardware.abilities(device))
    wanted = distinct_gemms(calls, device)
    pending = [gemm for gemm in wanted if force or not _is_tuned(gemm.key, machine)]
    tuning_run = _Tuning(pending, device, timer or cuda_seconds, progress)
    interrupted = False
    try:
        with current(device):
            tuning_run.compile(default_workers() if workers is None else workers)
            tuning_run.measure(machine)
    except KeyboardInterrupt:
        interrupted = True
    return Tuned(tuning_run.entries, len(wanted) - len(pending), tuple(tuning_run.failed), interrupted)


class _Tuning:
    """The GEMMs to tune, and the results so far."""

    def __init__(
        self, pending: Sequence[AnyGemm], device: torch.device, timer: Timer, progress: Callable[[int, int], object]
    ) -> None:
        self.device, self.timer, self.progress = device, timer, progress
        self.entries: Entries = {}
        self.failed: list[str] = []
        self.tried = [(gemm, config) for gemm in pending for config in gemm.candidates(device)]
        self.compiled: dict[AnyGemm, list[MatmulConfig]] = {gemm: [] for gemm in pending}
        self.steps = 0
        self._step(0)

    def _step(self, by: int = 1) -> None:
        self.steps += by
        self.progress(self.steps, len(self.tried) + len(self.compiled))

    def compile(self, workers: int) -> None:
        """Compile every candidate; candidates that fail are not measured."""

        def done(index: int, error: str | None) -> None:
            gemm, config = self.tried[index]
            if error is None:
                self.compiled[gemm].append(config)
            else:
                self.failed.append(f"{gemm} in {config.name}: {error}")
            self._step()

        run_jobs([OpJob(gemm.call, config.name) for gemm, config in self.tried], self.device, workers, done)

    def measure(self, machine: str) -> None:
        """Find the fastest configuration of each GEMM, and save it."""
        for gemm, configs in self.compiled.items():
            try:
                self.entries[gemm.key] = _fastest(gemm, configs, self.device, self.timer, self.failed)
            except Exception as error:
                # The others are still measured: only this GEMM may be too large for the memory, for example.
                self.failed.append(f"{gemm}: {first_line(error)}")
            else:
                # All entries each time: an earlier save may have failed, and this one may succeed.
                store.save(self.entries, machine)
                tuning.install(self.entries, machine)
            self._step()


def versions() -> dict[str, str]:
    """The versions that are stored with an entry measured now."""
    return {"triton": triton.__version__, "tritonfp8": tritonfp8.__version__}


def _is_tuned(key: Key, machine: str) -> bool:
    entry = tuning.table(machine).get(key.kind, {}).get(key)
    if entry is None or find(key.kind, entry.config) is None:
        return False
    return {"triton": entry.triton, "tritonfp8": entry.tritonfp8} == versions()


def _fastest(
    gemm: AnyGemm, configs: Sequence[MatmulConfig], device: torch.device, timer: Timer, failed: list[str]
) -> Entry:
    args = gemm.operands(device)
    expected = gemm.expected(args)
    # Filled with NaN, so that the check finds elements that a configuration does not write.
    out = torch.full(expected.shape, torch.nan, dtype=gemm.out_dtype, device=device)
    right = []
    for config in configs:
        try:
            _check(gemm.run(args, config, out.fill_(torch.nan)), expected, gemm)
            right.append(config)
        except Exception as error:
            failed.append(f"{gemm} in {config.name}: {first_line(error)}")
    seconds = timer([functools.partial(gemm.run, args, config, out) for config in right]) if right else []
    timed = [(s, i) for i, s in enumerate(seconds) if math.isfinite(s) and s > 0]
    if not timed:
        raise RuntimeError(f"none of {len(configs)} configurations ran")
    best, i = min(timed)
    return Entry(right[i].name, round(best * 1e6, 3), **versions())


def _check(out: Tensor, expected: Tensor, gemm: AnyGemm) -> None:
    """Raise AssertionError if ``out`` is wrong. In bands of rows: the whole output in float64 may exceed the memory."""
    out, expected = out.flatten(0, -2), expected.flatten(0, -2)
    for rows in _bands(len(out)):
        if gemm.key.kind.accumulation == "precise":
            assert_matmul_close(out[rows], expected[rows], gemm.out_dtype)
            continue
        overall, worst = sqnr(out[rows], expected[rows]), worst_tile_sqnr(out[rows], expected[rows])
        if not (overall >= FAST_TOLERANCE.overall and worst >= FAST_TOLERANCE.worst_tile):
            raise AssertionError(f"SQNR of {overall:.2f} dB, {worst:.2f} in the worst tile; required {FAST_TOLERANCE}")


def _bands(rows: int) -> Iterator[slice]:
    return (slice(first, first + CHECKED_ROWS) for first in range(0, rows, CHECKED_ROWS))
