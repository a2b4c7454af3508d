"""The comparison of torchtitan's runs: its pairs of programs, and the results that it accepts."""

import math

import pytest
import torch

from bench.distributed import titan_trainer, torchtitan


def run(losses=(4.0, 3.0), stuck=(), converted=41):
    return {"losses": list(losses), "stuck": list(stuck), "converted": converted}


@pytest.mark.parametrize(
    ("other", "limit", "ok"),
    [
        (run((4.0, 3.0009)), 1e-3, True),
        (run((4.0, 3.0011)), 1e-3, False),
        (run((4.0011, 3.0)), 1e-3, False),
        (run((4.0, 3.0000001)), 0.0, False),
        (run((4.0, math.nan)), 1e-3, False),
        (run(stuck=["layers.0.attention.wq.weight"]), 1e-3, False),
        (run(converted=40), 1e-3, False),
    ],
)
def test_runs_must_agree_and_every_parameter_must_change(other, limit, ok):
    for pair in ((run(), other), (other, run())):
        assert torchtitan.judge(*pair, limit)["ok"] == ok


def test_each_recipe_is_compared_with_one_process_with_noise_and_without_the_gather():
    pairs = torchtitan.pairs_of(["rowwise", "mxfp8"], ["debugmodel"], ["float32"])
    compared = {(way, first.recipe, first.processes, other.processes) for way, first, other in pairs}
    assert compared == {
        ("tp", "bf16", 2, 1), ("tp", "rowwise", 2, 1), ("tp", "mxfp8", 2, 1),
        ("noise", "bf16", 1, 1), ("noise", "rowwise", 1, 1), ("noise", "mxfp8", 1, 1),
        ("gather", "rowwise", 2, 2), ("gather", "mxfp8", 2, 2),
    }  # fmt: skip
    for way, first, other in pairs:
        assert (first.tp, other.tp) == ((2, 1) if way == "tp" else (1, 1))
        assert (first.noise > 0) == (way == "noise")
        assert other.noise == 0
        assert first.gather
        assert other.gather == (way != "gather")


def test_noise_moves_matrices_by_its_share():
    parameter = torch.empty(64, 32)
    plain, same, noisy = (torchtitan._initial("layers.0.wq", parameter, noise) for noise in (0.0, 0.0, 1e-3))
    assert torch.equal(plain, same)
    shares = (noisy - plain).abs() / plain.abs()
    assert 0 < shares.max() < 1e-2
    assert shares.mean() == pytest.approx(1e-3 * math.sqrt(2 / math.pi), rel=0.1)


def test_speed_of_a_whole_model_is_the_median_of_the_windows_after_the_first():
    def row(step, speed, reserved):
        return {
            "step": step, "throughput(tps)": speed, "loss_metrics/global_avg_loss": 1.0 / step,
            "memory/max_reserved(GiB)": reserved, "memory/max_active(GiB)": 1.0,
        }  # fmt: skip

    found = titan_trainer._summary(
        [row(1, 5.0, 3.0), row(10, 50.0, 9.0), row(20, 70.0, 4.0), row(30, 80.0, 4.0)], 10**10
    )
    assert found["tokens_per_second"] == 75.0
    assert found["tflops"] == 0.75
    assert (found["peak_gib"], found["logged_steps"]) == (9.0, [1, 10, 20, 30])


def test_unknown_whole_models_are_refused():
    with pytest.raises(ValueError, match=r"the model must be one of debug, 8b, 70b, 30b-a3b(.|\n)*got '9b'"):
        titan_trainer.config_of(titan_trainer.Whole("9b", "bf16"), "")
