"""Time contenders side by side: a gate first, then rounds in which all of them take turns, medians."""

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.contest.cases import Case
from bench.contest.gates import same_every_time
from bench.shapes import Shape

FLUSH_BYTES = 256 * 2**20
# At least a few in a row: what a step leaves of the GPU's power and clocks is part of the next one's time.
MIN_RUNS, MAX_RUNS = 5, 200
# What is so short that more would fit leaves the GPU to the flushes between: these take little power.
MAX_SETTLING_RUNS = 300
# The queue of a GPU takes about a thousand launches before the host waits for it.
HOST_CALLS = 100
MAX_REASON = 160
DIGITS = 5
GEMM_KERNELS = ("matmul", "gemm", "nvjet", "cutlass", "xmma", "cublas")

Function = Callable[[], Any]
Row = dict[str, Any]


def measures(kind: str, cases: Sequence[Case]) -> Callable[[Function], Function]:
    """Decorator of a test: it runs each of ``cases`` on each chosen shape of this kind."""

    def mark(test: Any) -> Any:
        test.kind, test.cases = kind, cases
        return test

    return mark


@dataclass(frozen=True)
class Contender:
    """One of those that are compared in a test.

    Attributes:
        name: what the report calls it.
        make: builds what is timed; what it holds counts as memory of the contender.
        check: raises AssertionError for a wrong result.
        own: a failure fails the test. A peer that cannot run is reported with its reason.
        same_bits: every run has to give the same bits, where it is our own; not where torch adds up in any order.
        peer: name of the contender that this one is compared with.
        fields: further fields of its row; ``make`` may add some.
    """

    name: str
    make: Callable[[], Function]
    check: Callable[[Any], None] = lambda result: None
    own: bool = False
    same_bits: bool = True
    peer: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Effort:
    """How long is measured.

    Attributes:
        rounds: in each of which every contender has a turn.
        seconds: that a contender is timed in a round.
        runs: that must give the same bits before anything is timed.
        settle: seconds that a contender runs before it is timed, where its own power decides how fast it is.
    """

    rounds: int
    seconds: float
    runs: int
    settle: float


FULL, QUICK, SMOKE_EFFORT = Effort(7, 0.04, 100, 0.5), Effort(3, 0.02, 10, 0.2), Effort(2, 0.0, 2, 0.0)


class Stopwatch:
    """Sums up what is measured: the timer of pytest-benchmark, which takes the difference around a round."""

    def __init__(self) -> None:
        self.total = 0.0

    def read(self) -> float:
        """Seconds measured so far."""
        return self.total


class Device:
    """Times functions on a device: by events on a GPU, by the host's clock on a CPU."""

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self.device = device
        self.effort = effort
        self.flush = torch.empty(FLUSH_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)

    def synchronize(self) -> None:
        """Wait for what was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gpu_seconds(self, function: Function) -> float:
        """Median time of a run, as many as fit into the effort, as in training: the host works on the next runs while
        the GPU works on one. L2 is flushed before each.
        """
        return self._median(function, 0.0)

    def settled_seconds(self, function: Function) -> float:
        """As :meth:`gpu_seconds`, after as many runs as the GPU takes to settle.

        Matrix products take a GPU to its power limit, and its clocks follow what ran in the last tenths of a second: a
        short turn is timed at the clocks that the contender before it left, not at those that it would train at.
        """
        return self._median(function, self.effort.settle)

    def _median(self, function: Function, settle: float) -> float:
        times = self._runs(function, 1)
        if self.effort.seconds:
            timed = min(MAX_RUNS, max(MIN_RUNS, _fitting_runs(self.effort.seconds, times[0])))
            times = self._runs(function, _settling_runs(settle, times[0]) + timed)[-timed:]
        return statistics.median(times)

    def _runs(self, function: Function, count: int) -> list[float]:
        if self.device.type != "cuda":
            return [_wall_seconds(function) for _ in range(count)]
        # The first finds nothing in the queue, so that the GPU waits for the host: it is not counted.
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count + 1)]
        for start, end in events:
            self.flush.zero_()
            start.record()
            function()
            end.record()
        self.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in events[1:]]

    def host_seconds(self, function: Function) -> float:
        """Time that the host takes for a call; the GPU is waited for before and after, not in between."""
        calls = HOST_CALLS if self.effort.seconds else 1
        self.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        seconds = time.perf_counter() - start
        self.synchronize()
        return seconds / calls

    def memory(self) -> int:
        """Bytes allocated now; the peak is counted from here."""
        if self.device.type != "cuda":
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device)

    def peak(self, since: int) -> Row:
        """The peak of what is allocated beyond ``since``, as a field; none on a CPU."""
        if self.device.type != "cuda":
            return {}
        return {"peak_bytes": torch.cuda.max_memory_allocated(self.device) - since}

    def breakdown(self, function: Function) -> Row:
        """GPU time of a run in matrix products and in everything else, as fields: the mean of as many runs as the GPU
        takes to settle. None on a CPU.

        What is timed after it may have a slower host: the profiler's library stays in the way of each launch.
        """
        if self.device.type != "cuda":
            return {}
        runs = max(MIN_RUNS, _settling_runs(self.effort.settle, self._runs(function, 1)[0]))
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(runs):
                function()
            self.synchronize()
        return kernel_seconds(
            (event.key, event.self_device_time_total / 1e6 / runs)
            for event in profiler.key_averages()
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        )

    def release(self) -> None:
        """Let nothing of one test reach the next: compiled code and memory."""
        torch.compiler.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _fitting_runs(seconds: float, run: float) -> int:
    """How many runs, each of ``run`` seconds, fit."""
    return int(seconds / max(run, 1e-6))


def _settling_runs(seconds: float, run: float) -> int:
    return min(MAX_SETTLING_RUNS, _fitting_runs(seconds, run))


def _wall_seconds(function: Function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def describe(error: Exception) -> str:
    """What an error says, in a line for a table."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:MAX_REASON]


def kernel_seconds(kernels: Iterable[tuple[str, float]]) -> Row:
    """``(name, seconds)`` of kernels, summed up into those of matrix products and the others; no fields of none."""
    sums = {"gemm_seconds": 0.0, "other_seconds": 0.0}
    for name, seconds in kernels:
        is_gemm = any(part in name.lower() for part in GEMM_KERNELS)
        sums["gemm_seconds" if is_gemm else "other_seconds"] += seconds
    return sums if any(sums.values()) else {}


def rounded(x: float) -> float:
    """``x`` to the digits that a measurement has."""
    return float(f"{x:.{DIGITS}g}")


class Contest:
    """Compares contenders on one shape and notes a row for each.

    Attributes:
        device: what they run on, and its clocks.
        smoke: whether only the plumbing is tried: nothing is said about speed, compilers are left out.
        quick: whether peers that have to be compiled are measured on few shapes only.
    """

    def __init__(
        self, suite: str, device: Device, stopwatch: Stopwatch, rows: Path | None, *, smoke: bool, quick: bool
    ) -> None:
        self.suite, self.device, self.smoke, self.quick = suite, device, smoke, quick
        self._stopwatch, self._rows = stopwatch, rows

    def __call__(
        self,
        benchmark: Any,
        case: Case,
        shape: Shape,
        contenders: Sequence[Contender],
        clock: Callable[[Function], float] | None = None,
        rounds: int | None = None,
    ) -> None:
        """Gate, measure, note. The first contender of our own is the benchmark's own figure.

        Args:
            benchmark: pytest-benchmark's fixture.
            case: what is measured.
            shape: on what.
            contenders: who takes part, in the order of a round.
            clock: seconds of a function; by default those of the GPU.
            rounds: instead of the effort's.

        Raises:
            AssertionError: a result of our own was wrong; it has no time. The others were noted before.
            Exception: whatever else one of our own raised, likewise.
        """
        clock = clock or self.device.gpu_seconds
        rows, functions, failure = self._prepare_all(case, shape, contenders)
        times = self._rounds(benchmark, contenders, functions, clock, rounds or self.device.effort.rounds)
        for name, samples in times.items():
            median = statistics.median(samples)
            rows[name] |= {"seconds": rounded(median), "spread": rounded((max(samples) - min(samples)) / median)}
        benchmark.extra_info["rows"] = list(rows.values())
        self._finish(rows, functions, failure)

    def break_down(self, case: Case, shape: Shape, contenders: Sequence[Contender]) -> None:
        """Gate, and note what the GPU's time of a run goes to, and the sum as its seconds. To be called once everything
        else is timed (:meth:`Device.breakdown`).

        Raises:
            AssertionError, Exception: as a call.
        """
        rows, functions, failure = self._prepare_all(case, shape, contenders)
        for name, function in functions.items():
            parts = self.device.breakdown(function)
            seconds = {"seconds": rounded(sum(parts.values())), **parts}
            rows[name] |= seconds if parts else {"reason": "no kernels of a GPU to look at"}
        self._finish(rows, functions, failure)

    def _prepare_all(
        self, case: Case, shape: Shape, contenders: Sequence[Contender]
    ) -> tuple[dict[str, Row], dict[str, Function], Exception | None]:
        """Rows of all contenders, what of them can be timed, and what one of our own raised."""
        rows = {c.name: self._row(case, shape, c) for c in contenders}
        functions: dict[str, Function] = {}
        failure: Exception | None = None
        for contender in contenders:
            try:
                functions[contender.name] = self._prepare(contender, rows[contender.name])
            # Whatever a peer raises is its reason; our own is raised again once the others are noted.
            except Exception as error:
                rows[contender.name]["reason"] = describe(error)
                failure = failure or (error if contender.own else None)
        return rows, functions, failure

    def _finish(self, rows: dict[str, Row], functions: dict[str, Function], failure: Exception | None) -> None:
        if self._rows is not None:
            with self._rows.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows.values())
        functions.clear()
        self.device.release()
        if failure is not None:
            raise failure

    def _row(self, case: Case, shape: Shape, contender: Contender) -> Row:
        return {
            "suite": self.suite,
            "case": case.name,
            "set": shape.set,
            "name": shape.name,
            "shape": list(shape.size),
            "contender": contender.name,
            "own": contender.own,
            "peer": contender.peer,
            "seconds": None,
            **contender.fields,
        }

    def _prepare(self, contender: Contender, row: Row) -> Function:
        """Build, run, check; then run once more for the peak of memory."""
        before = self.device.memory()
        function = contender.make()
        row |= self._gate(contender, function)
        self.device.memory()
        function()
        row |= self.device.peak(before)
        # With those that making it has found.
        row |= contender.fields
        return function

    def _gate(self, contender: Contender, function: Function) -> Row:
        """Fields of a right result; what it was is let go of."""
        result = function()
        contender.check(result)
        if not (contender.own and contender.same_bits):
            return {}
        same_every_time(function, result, self.device.effort.runs, self.device.flush.zero_)
        return {"same_bits_runs": self.device.effort.runs}

    def _rounds(
        self,
        benchmark: Any,
        contenders: Sequence[Contender],
        functions: dict[str, Function],
        clock: Callable[[Function], float],
        rounds: int,
    ) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in functions}
        first = next((c.name for c in contenders if c.own and c.name in functions), None)

        def others() -> None:
            for name in functions:
                if name != first:
                    times[name].append(clock(functions[name]))

        def own() -> None:
            times[first].append(clock(functions[first]))
            self._stopwatch.total += times[first][-1]

        if first is not None:
            benchmark.pedantic(own, setup=others, rounds=rounds)
        else:
            benchmark.skipped = True
        return times
