"""The benchmark of monitor: each window has the steps and the samples that it is named after."""

import pytest

from bench import health, shapes
from tritonfp8.workflow.health.observer import Observer

EVERY, ROUNDS = 3, 2


def test_windows_have_one_sample_or_none(monkeypatch):
    monkeypatch.setattr(health, "EVERY", EVERY)
    samples, windows, steps = [], [], []
    start, seconds = Observer.start, health.seconds

    def started(observer):
        samples.append(observer)
        start(observer)

    def counted(window, device):
        before = len(samples)
        found = seconds(window, device)
        windows.append(len(samples) - before)
        steps.append(found)
        return found

    monkeypatch.setattr(Observer, "start", started)
    monkeypatch.setattr(health, "seconds", counted)
    shape = next(shape for shape in shapes.select("model", ["smoke"]) if len(shape.size) == 7)
    found = health.measure(shape, "rowwise", compile=False, rounds=ROUNDS, rows=[64])
    assert list(found) == ["plain", "unsampled", "sampled 64"]
    assert windows == [0, 0, 1] * ROUNDS
    assert all(each > 0 for each in steps)


def test_cost_is_the_share_that_a_sample_adds():
    assert health.cost({"plain": 2.0, "sampled 8": 2.03, "sampled 16": 3.0}, 8) == pytest.approx(0.015)
