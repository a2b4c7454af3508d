import contextlib
import dataclasses
import itertools
import json
import platform
import sys
import types

import pytest
import torch

from bench.contest import compare as contests
from bench.contest import machine
from bench.contest.cases import Case
from bench.contest.compare import Contender, Contest, Device, Effort, Stopwatch
from bench.shapes import Shape
from tritonfp8.advice import kernels

CASE, SHAPE = Case("case"), Shape("set", "name", (2, 3))


class FakeBenchmark:
    """pytest-benchmark's fixture, as far as it is used; its figures are differences of the stopwatch."""

    def __init__(self, stopwatch):
        self.stopwatch, self.extra_info, self.samples, self.skipped = stopwatch, {}, [], False

    def pedantic(self, target, setup, rounds):
        for _ in range(rounds):
            setup()
            before = self.stopwatch.read()
            target()
            self.samples.append(self.stopwatch.read() - before)


class Fight:
    """A contest whose clock is the value that a function returns; notes the order in which functions ran."""

    def __init__(self, tmp_path, rounds=3, runs=1):
        self.stopwatch = Stopwatch()
        self.benchmark = FakeBenchmark(self.stopwatch)
        self.path = tmp_path / "rows.jsonl"
        device = Device(torch.device("cpu"), Effort(rounds, 0.0, runs, 0.0))
        self.contest = Contest("suite", device, self.stopwatch, self.path, smoke=True, quick=False)
        self.order = []

    def contender(self, name, seconds, **options):
        values = iter(seconds)

        def run():
            self.order.append(name)
            return next(values)

        return Contender(name, lambda: run, **options)

    def run(self, *contenders):
        self.contest(self.benchmark, CASE, SHAPE, contenders, clock=lambda function: function())

    @property
    def rows(self):
        return {row["contender"]: row for row in map(json.loads, self.path.read_text().splitlines())}


@pytest.fixture
def fight(tmp_path):
    return Fight(tmp_path)


def wrong(result):
    raise AssertionError("is wrong")


def test_what_making_a_contender_finds_is_in_its_row(fight):
    fields = {"bytes": 7}
    contender = fight.contender("own", [9] * 5, own=True, fields=fields)

    def make():
        fields["extra_launches"] = 3
        return contender.make()

    fight.run(dataclasses.replace(contender, make=make))
    assert (fight.rows["own"]["bytes"], fight.rows["own"]["extra_launches"]) == (7, 3)


# The first two values are for the gate and for the run that finds the peak of memory.
def test_medians_of_rounds_in_which_all_take_turns(fight):
    fight.run(
        fight.contender("own", [9, 9, 3, 1, 2], own=True, peer="peer", fields={"bytes": 7}),
        fight.contender("peer", [9, 9, 5, 4, 6]),
    )
    assert fight.order == ["own"] * 2 + ["peer"] * 2 + ["peer", "own"] * 3
    assert fight.benchmark.samples == [3, 1, 2]
    own, peer = fight.rows["own"], fight.rows["peer"]
    assert (own["seconds"], peer["seconds"]) == (2, 5)
    assert own["spread"] == 1
    assert own["peer"] == "peer"
    assert own["bytes"] == 7
    assert (own["suite"], own["case"], own["set"], own["name"]) == ("suite", "case", "set", "name")
    assert own["shape"] == [2, 3]
    assert fight.benchmark.extra_info["rows"] == [own, peer]


def test_a_failed_gate_fails_the_test_and_has_no_time(fight):
    with pytest.raises(AssertionError, match="is wrong"):
        fight.run(
            fight.contender("own", [1] * 5, own=True, check=wrong),
            fight.contender("other", [2] * 5, own=True),
            fight.contender("peer", [3] * 5),
        )
    assert fight.rows["own"]["seconds"] is None
    assert fight.rows["own"]["reason"] == "AssertionError: is wrong"
    assert fight.rows["peer"]["seconds"] == 3
    assert fight.benchmark.samples == [2, 2, 2]


def test_without_any_right_result_nothing_is_the_benchmarks(fight):
    with pytest.raises(AssertionError):
        fight.run(fight.contender("own", [1] * 5, own=True, check=wrong))
    assert fight.benchmark.samples == []
    assert fight.benchmark.skipped


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ModuleNotFoundError("No module named 'peer'\nand more"), "ModuleNotFoundError: No module named 'peer'"),
        (ValueError("x" * 999), f"ValueError: {'x' * 999}"[: contests.MAX_REASON]),
    ],
)
def test_a_peer_that_cannot_run_or_is_wrong_has_no_time_and_a_reason(fight, error, reason):
    def make():
        raise error

    peers = Contender("peer", make), fight.contender("wrong peer", [1] * 5, check=wrong)
    fight.run(fight.contender("own", [1] * 5, own=True), *peers)
    assert (fight.rows["peer"]["reason"], fight.rows["peer"]["seconds"]) == (reason, None)
    assert fight.rows["wrong peer"]["seconds"] is None
    assert fight.rows["own"]["seconds"] == 1


def test_every_second_run_finds_empty_caches(tmp_path):
    fight = Fight(tmp_path, runs=5)
    fight.contest.device.flush = types.SimpleNamespace(zero_=lambda: fight.order.append("flush"))
    value = torch.tensor(1.0)
    contender = Contender("it", lambda: lambda: fight.order.append("run") or value, own=True)
    fight.run(contender, fight.contender("peer", [1] * 9))
    gate = fight.order[: fight.order.index("peer")]
    # The run whose bits the others must have, theirs, and one for the peak of memory.
    assert gate == ["run", "flush", "run", "run", "flush", "run", "run", "run"]


@pytest.mark.parametrize(
    ("bits", "options", "said"),
    [
        ([0.0, 0.0, 0.0], {"own": True}, None),
        ([0.0, 0.0, -0.0], {"own": True}, "run 3 of 3 gave other bits"),
        ([1.0, 2.0], {"own": True}, "run 2 of 3 gave other bits"),
        ([1.0], {"own": True, "same_bits": False}, None),
        ([1.0], {}, None),
    ],
)
def test_all_runs_of_our_own_give_the_same_bits_before_they_are_timed(tmp_path, bits, options, said):
    fight = Fight(tmp_path, runs=3)
    results = itertools.chain(map(torch.tensor, bits), itertools.repeat(torch.tensor(7.0)))
    contender = Contender("it", lambda: lambda: next(results), **options)
    fighters = fight.contender("own", [1] * 5, own=True, same_bits=False), contender
    if said is None:
        fight.run(*fighters)
        assert fight.rows["it"]["seconds"] == 7
        assert fight.rows["it"].get("same_bits_runs") == (3 if len(bits) == 3 else None)
    else:
        with pytest.raises(AssertionError, match=said):
            fight.run(*fighters)
        assert fight.rows["it"]["seconds"] is None


def test_clocks_take_the_time_of_a_function():
    device = Device(torch.device("cpu"), Effort(1, 0.001, 1, 0.0))
    calls = []
    for clock, least in ((device.gpu_seconds, 2), (device.host_seconds, contests.HOST_CALLS)):
        calls.clear()
        assert 0 < clock(lambda: calls.append(0)) < 0.01
        assert len(calls) >= least


def test_settled_seconds_follow_the_runs_that_a_gpu_takes_to_settle(monkeypatch):
    device, calls = Device(torch.device("cpu"), Effort(1, 0.3, 1, 0.2)), []
    # What the contender before it left makes the first runs fast: one that tells how many fit, then two to settle.
    seconds = iter([0.1, *[0.1] * 2, *[0.25] * 5])
    monkeypatch.setattr(contests.timers, "wall_seconds", lambda function: function() or next(seconds))
    assert device.settled_seconds(lambda: calls.append(0)) == 0.25
    assert len(calls) == 1 + 2 + contests.MIN_RUNS
    # They have an end.
    device, calls[:] = Device(torch.device("cpu"), Effort(1, 0.001, 1, 1e3)), []
    monkeypatch.setattr(contests.timers, "wall_seconds", lambda function: function() or 1e-3)
    device.settled_seconds(lambda: calls.append(0))
    assert len(calls) == 1 + contests.MAX_SETTLING_RUNS + contests.MIN_RUNS


def test_kernels_are_told_apart_by_their_names():
    gemms = [("hopper_matmul_kernel", 1.0), ("nvjet_qqtst_128x256", 2.0), ("sm90_xmma_gemm_bf16", 4.0)]
    gemms.append(("hopper_grouped_kernel", 64.0))
    others = [("quantize_kernel", 8.0), ("triton_red_fused_scaled_matmul_amax", 16.0), ("Memset (Device)", 32.0)]
    sums = {"gemm_seconds": 71.0, "cast_seconds": 8.0, "other_seconds": 48.0}
    assert kernels.kernel_seconds([*gemms, *others]) == sums
    assert kernels.kernel_seconds([]) == {}


def profiled(monkeypatch, runs):
    """A device on which each run is one product of 2 s and one cast of 1 s, and the profiler counts them."""
    kind = torch.autograd.DeviceType.CUDA
    events = [
        types.SimpleNamespace(
            key=key,
            count=runs,
            self_device_time_total=runs * seconds * 1e6,
            device_type=kind,
            is_user_annotation=annotation,
        )
        for key, seconds, annotation in (("a_matmul", 2.0, False), ("cast_kernel", 1.0, False), ("a step", 9.0, True))
    ]
    profiler = types.SimpleNamespace(key_averages=lambda: events)
    monkeypatch.setattr(kernels, "profile", lambda activities: contextlib.nullcontext(profiler))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    device = Device(torch.device("cpu"), Effort(1, 0.0, 1, 0.03))
    monkeypatch.setattr(device, "_runs", lambda function, count: [0.01 / (runs / 3)] * count)
    monkeypatch.setattr(device, "synchronize", lambda: None)
    device.device = types.SimpleNamespace(type="cuda")
    return device


@pytest.mark.parametrize("runs", [6, 12])
def test_the_parts_of_a_run_are_the_mean_of_those_that_settle(monkeypatch, runs):
    calls = []
    found = profiled(monkeypatch, runs).breakdown(lambda: calls.append(0))
    assert len(calls) == runs
    assert found == pytest.approx({"gemm_seconds": 2.0, "cast_seconds": 1.0, "other_seconds": 0.0})


def test_kernels_of_contenders_are_noted_with_their_sum(fight, monkeypatch):
    parts = iter([{"gemm_seconds": 2.0, "other_seconds": 1.0}, {"gemm_seconds": 4.0, "other_seconds": 0.5}])
    monkeypatch.setattr(fight.contest.device, "breakdown", lambda function: next(parts))
    broken = Contender("broken", lambda: 1 / 0)
    own = fight.contender("own", [9] * 3, own=True, peer="bf16")
    fight.contest.break_down(CASE, SHAPE, [own, broken, fight.contender("bf16", [9] * 3)])
    found = {name: (row["seconds"], row.get("gemm_seconds")) for name, row in fight.rows.items()}
    assert found == {"own": (3.0, 2.0), "broken": (None, None), "bf16": (4.5, 4.0)}
    assert fight.rows["broken"]["reason"] == "ZeroDivisionError: division by zero"


def test_kernels_without_a_gpu_have_a_reason_and_what_is_wrong_is_raised(fight):
    contenders = fight.contender("own", [9] * 3), fight.contender("wrong", [9], own=True, check=wrong)
    with pytest.raises(AssertionError, match="is wrong"):
        fight.contest.break_down(CASE, SHAPE, contenders)
    assert fight.rows["own"]["reason"] == "no GPU kernels to profile"
    assert fight.rows["wrong"]["reason"] == "AssertionError: is wrong"


def test_the_machine_is_described_without_its_name():
    description = machine.describe_machine()
    assert platform.node() not in json.dumps(description)
    assert description["torch"] == torch.__version__
    assert set(description) >= {"gpu", "triton", "torchao", "tritonfp8"}


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (["--only", "launch", "--out", "/secret/place", "--quick"], "report --only launch --quick"),
        (["--out=/secret/place"], "report"),
        (["--shapes", "odd"], "report --shapes odd"),
        (["--shapes", "deepseek v3,odd"], "report --shapes 'deepseek v3,odd'"),
    ],
)
def test_the_command_is_noted_without_a_path_of_the_machine(monkeypatch, arguments, kept):
    monkeypatch.setattr("sys.argv", ["/secret/report", *arguments])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert machine.command_line() == kept


def test_results_are_written_a_row_a_line(tmp_path):
    rows = [{"a": 1}, {"a": [2, 3]}]
    machine.write_results(tmp_path / "x.json", {"outcome": "complete", "rows": rows})
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text)["rows"] == rows
    assert '\n{"a": 1},\n' in text
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
