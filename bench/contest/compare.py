"""Time contenders side by side: first a gate, then rounds in which each contender is timed once; medians."""

import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.contest.cases import Case
from bench.contest.gates import same_every_time
from bench.shapes import Shape
from tritonfp8.advice import kernel_seconds, profiled
from tritonfp8.training import timers

FLUSH_BYTES = 256 * 2**20
# Time several runs in a row: a run's time depends on the GPU's power and clocks after the previous one.
MIN_RUNS, MAX_RUNS = 5, 200
# Very short functions do not settle the clocks further: the flushes between runs dominate and take little power.
MAX_SETTLING_RUNS = 300
# A GPU queues about a thousand launches before the host has to wait.
HOST_CALLS = 100
MAX_REASON = 160
DIGITS = 5

Function = Callable[[], Any]
Row = dict[str, Any]


def measures(kind: str, cases: Sequence[Case]) -> Callable[[Function], Function]:
    """Decorator: the test runs each of ``cases`` on each selected shape of this kind."""

    def mark(test: Any) -> Any:
        test.kind, test.cases = kind, cases
        return test

    return mark


@dataclass(frozen=True)
class Contender:
    """One implementation in a comparison.

    Attributes:
        name: its name in the report.
        make: builds the timed function; tensors that it keeps alive count as the contender's memory.
        check: raises AssertionError for a wrong result.
        own: whether it is of this package. Then a failure fails the test; a peer that cannot run is only reported.
        same_bits: whether all runs must give the same bits (own contenders only); False if torch's sums vary.
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
    """How long to measure.

    Attributes:
        rounds: each times every contender once.
        seconds: time for a contender in a round.
        runs: runs that must give the same bits before anything is timed.
        settle: seconds that a contender runs before it is timed, if the GPU's clocks depend on its power.
    """

    rounds: int
    seconds: float
    runs: int
    settle: float


FULL, QUICK, SMOKE_EFFORT = Effort(7, 0.04, 100, 0.5), Effort(3, 0.02, 10, 0.2), Effort(2, 0.0, 2, 0.0)


class Stopwatch:
    """Sum of measured seconds. pytest-benchmark uses it as timer and takes the difference over a round."""

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
        """Wait for all launched kernels."""
        timers.synchronize(self.device)

    def gpu_seconds(self, function: Function) -> float:
        """Median seconds of the runs that fit into the effort. L2 is flushed before each run.

        As in training, the host launches the next runs while the GPU works on one.
        """
        return self._median(function, 0.0)

    def settled_seconds(self, function: Function) -> float:
        """As :meth:`gpu_seconds`, after enough runs for the GPU's clocks to settle.

        GEMMs reach the GPU's power limit, and clocks follow the load of the last tenths of a second. Without settling a
        short measurement runs at the clocks of the previous contender, not at the clocks of training.
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
            return [timers.wall_seconds(function) for _ in range(count)]
        # The first run is not counted: the queue is empty, so the GPU waits for the host.
        return timers.gpu_seconds([function] * (count + 1), self.flush.zero_)[1:]

    def host_seconds(self, function: Function) -> float:
        """Host seconds of a call. The host waits for the GPU before and after all calls, not between them."""
        calls = HOST_CALLS if self.effort.seconds else 1
        self.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        seconds = time.perf_counter() - start
        self.synchronize()
        return seconds / calls

    def idle_host_seconds(self, function: Function, calls: int) -> float:
        """Median host seconds of a call that finds the GPU idle."""
        return timers.idle_host_seconds(function, self.device, calls)

    def memory(self) -> int:
        """Bytes allocated now. Resets the peak."""
        return timers.allocated(self.device)

    def peak(self, since: int) -> Row:
        """Peak of allocated bytes beyond ``since``, as a field; empty on a CPU."""
        peak = timers.peak_bytes(self.device, since)
        return {} if peak is None else {"peak_bytes": peak}

    def breakdown(self, function: Function) -> Row:
        """GPU seconds of a run in GEMMs, casts and other kernels, as fields. Empty on a CPU.

        They are means over enough runs for the clocks to settle.

        Call it after all timing: the profiler's library stays loaded and slows every later launch.
        """
        if self.device.type != "cuda":
            return {}
        runs = max(MIN_RUNS, _settling_runs(self.effort.settle, self._runs(function, 1)[0]))
        return kernel_seconds((name, seconds) for name, _, seconds in profiled(function, runs))

    def release(self) -> None:
        """Free compiled code and memory before the next test."""
        torch.compiler.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _fitting_runs(seconds: float, run: float) -> int:
    """Number of runs of ``run`` seconds that fit."""
    return int(seconds / max(run, 1e-6))


def _settling_runs(seconds: float, run: float) -> int:
    return min(MAX_SETTLING_RUNS, _fitting_runs(seconds, run))


def describe(error: Exception) -> str:
    """The first line of an error, for a table."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:MAX_REASON]


def rounded(x: float) -> float:
    """``x`` rounded to the digits of a measurement."""
    return float(f"{x:.{DIGITS}g}")


class Contest:
    """Compares contenders on one shape and writes a row for each.

    Attributes:
        device: the device, with its clocks.
        smoke: only test that the suites run: no meaningful speeds, no compilation.
        quick: measure peers that need compilation on few shapes only.
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
        """Check results, measure, and write the rows. The first own contender gives pytest-benchmark's figure.

        Args:
            benchmark: pytest-benchmark's fixture.
            case: the case.
            shape: the shape.
            contenders: the contenders, in the order of a round.
            clock: measures the seconds of a function; default: GPU seconds.
            rounds: replaces the effort's number of rounds.

        Raises:
            AssertionError: an own contender's result was wrong; it gets no time. All rows are written before.
            Exception: any other error of an own contender; all rows are written before.
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
        """Check results, and write the GPU seconds of GEMMs, casts and other kernels, with their sum as the time. Call
        it after all timing (:meth:`Device.breakdown`).

        Raises:
            AssertionError, Exception: as :meth:`__call__`.
        """
        rows, functions, failure = self._prepare_all(case, shape, contenders)
        for name, function in functions.items():
            parts = self.device.breakdown(function)
            seconds = {"seconds": rounded(sum(parts.values())), **parts}
            rows[name] |= seconds if parts else {"reason": "no GPU kernels to profile"}
        self._finish(rows, functions, failure)

    def _prepare_all(
        self, case: Case, shape: Shape, contenders: Sequence[Contender]
    ) -> tuple[dict[str, Row], dict[str, Function], Exception | None]:
        """Rows of all contenders, functions of the contenders that can be timed, and the first error of an own one."""
        rows = {c.name: self._row(case, shape, c) for c in contenders}
        functions: dict[str, Function] = {}
        failure: Exception | None = None
        for contender in contenders:
            try:
                functions[contender.name] = self._prepare(contender, rows[contender.name])
            # A peer's error is only noted as its reason. An own error is raised again after all rows are written.
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
        """Build, run and check a contender; then run it once more for its peak memory."""
        before = self.device.memory()
        function = contender.make()
        row |= self._gate(contender, function)
        self.device.memory()
        function()
        row |= self.device.peak(before)
        # ``make`` may have added fields.
        row |= contender.fields
        return function

    def _gate(self, contender: Contender, function: Function) -> Row:
        """Check a result; returns the fields of a right one, and keeps no tensors of it."""
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
