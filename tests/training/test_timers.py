"""Timers of a device. Without a GPU, events are fakes that read a clock which each piece of work moves."""

import itertools

import pytest
import torch

from tritonfp8.training import timers


@pytest.fixture
def gpu(monkeypatch):
    """The milliseconds that the fake GPU has worked, as a list of one, and the order of what it was given."""
    clock, given = [0.0], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream=None):
            given.append("event")
            self.at = clock[0]

        def elapsed_time(self, end):
            assert given[-1] == "wait"
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: given.append("wait"))

    def work(name, milliseconds):
        def run():
            given.append(name)
            clock[0] += milliseconds

        return run

    return work, given


def test_only_the_functions_are_timed(gpu):
    work, given = gpu
    a, b = work("a", 2.0), work("b", 5.0)
    assert timers.gpu_seconds([a, b, a], work("flush", 70.0)) == pytest.approx([2e-3, 5e-3, 2e-3])
    assert given == [*itertools.chain(*(["flush", "event", name, "event"] for name in "aba")), "wait"]
    assert timers.gpu_seconds([], work("flush", 70.0)) == []


def test_settled_calls_come_after_as_many_as_fit_into_the_time(gpu):
    work, given = gpu
    durations = iter([5.0, 4.0, *[8.0] * 3, 2.0, 3.0])

    def run():
        work("run", next(durations))()

    # The second call tells that three of 4 ms fit into 12 ms.
    assert timers.settled_seconds(run, 2, 12e-3, work("flush", 70.0)) == pytest.approx([2e-3, 3e-3])
    assert given.count("flush") == given.count("run") == 2 + 3 + 2
    given.clear()
    timers.settled_seconds(work("run", 1e-3), 2, 10.0, most=4)
    assert given.count("run") == 2 + 4 + 2


def test_a_cpu_is_never_waited_for_and_has_no_peak(gpu):
    cpu, calls = torch.device("cpu"), []
    assert 0 < timers.idle_host_seconds(lambda: calls.append(0), cpu, 3) < 0.1
    assert len(calls) == 3
    assert gpu[1] == []
    assert (timers.allocated(cpu), timers.peak_bytes(cpu, 0)) == (0, None)


def test_moments_of_a_cpu_are_seconds_of_its_clock(monkeypatch):
    clock = iter((3.0, 3.5, 5.0))
    monkeypatch.setattr(timers.time, "perf_counter", lambda: next(clock))
    moments = [timers.now(torch.device("cpu")) for _ in range(3)]
    assert list(itertools.starmap(timers.seconds_between, itertools.pairwise(moments))) == [0.5, 1.5]


@pytest.mark.gpu
def test_moments_of_a_gpu():
    x, device = torch.randn(4096, 4096, device="cuda"), torch.device("cuda")
    begin = timers.now(device)
    x @ x
    end = timers.now(device)
    torch.cuda.synchronize()
    assert 1e-5 < timers.seconds_between(begin, end) < 1.0


@pytest.mark.gpu
def test_memory_of_a_gpu_peaks_at_what_was_there_together():
    device = torch.device("cuda")
    before = timers.allocated(device)
    x = torch.empty(2**20, dtype=torch.uint8, device=device)
    y = x.clone()
    del y
    assert timers.peak_bytes(device, before) == 2 * 2**20
    assert timers.peak_bytes(device, timers.allocated(device)) == 0
