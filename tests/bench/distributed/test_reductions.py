"""The summary of runs whose gradients are reduced in other ways; and a run."""

import json
import subprocess
import sys

import pytest

from bench.distributed.models import REDUCTIONS
from bench.training.reductions import FILE, last_loss, summary


def row(losses, seconds, **sent):
    return {"losses": [losses, losses], "seconds": seconds, "bytes": {"all_gather": 7, **sent}}


def test_losses_are_compared_by_seed():
    seeds = {
        seed: [
            row([9.0, base], 1.0, reduce_scatter=400),
            row([9.0, base + 0.5], 0.9, reduce_scatter=200),
            row([9.0, base - 0.25], 0.8 + seed, all_to_all=101, reduce_scatter=0),
        ]
        for seed, base in ((0, 3.0), (1, 4.0))
    }
    plain, half, codes = summary(seeds)
    assert plain["over_float32"] == [0, 0]
    assert half["mean_over_float32"] == 0.5
    assert codes["over_float32"] == [-0.25, -0.25]
    assert [each["within"] for each in (plain, half, codes)] == [True, False, False]
    assert codes["noise"] == pytest.approx(0.5**0.5)
    assert (codes["gradient_bytes"], codes["seconds"]) == (101, 0.8)
    assert summary({0: seeds[0]})[0]["noise"] is None


def test_the_last_loss_is_a_mean_over_steps_and_ranks():
    found = {"losses": [[9.0] * 4 + [1.0, 2.0], [9.0] * 4 + [3.0, 4.0]]}
    assert last_loss(found) == 2.5
    assert last_loss({"losses": [[9.0] * 700 + [1.0] * 300 + [2.0] * 300]}) == 2


@pytest.mark.one_in(3)
def test_a_run_on_two_processes(tmp_path):
    sizes = ["--steps", "2", "--seeds", "1", "--batch-size", "1", "--seq-len", "16"]
    command = [sys.executable, "-m", "bench.training.reductions", "--device", "cpu", *sizes, "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    rows = json.loads((tmp_path / FILE).read_text())["rows"]
    assert [each["contender"] for each in rows] == list(REDUCTIONS)
    assert rows[2]["gradient_bytes"] <= 0.26 * rows[0]["gradient_bytes"]
    assert rows[2]["gradient_bytes"] <= 0.51 * rows[1]["gradient_bytes"]
