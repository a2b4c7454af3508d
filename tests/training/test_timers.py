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
