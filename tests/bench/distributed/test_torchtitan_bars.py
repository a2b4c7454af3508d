"""The comparison of torchtitan's runs: its pairs of programs, and the results that it accepts."""

import dataclasses
import math

import pytest
import torch
from torch import nn

import tritonfp8
from bench.distributed import torchtitan
from bench.distributed.titan import config, trainer


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


def test_more_ranks_add_tensor_parallelism_beside_fsdp(monkeypatch):
    monkeypatch.setattr(torchtitan, "shards_experts", lambda: True)
    for experts, kinds in ((False, {"tp": (8, 1), "tp x fsdp": (2, 1)}), (True, {"ep": (1, 4), "tp x ep": (2, 4)})):
        pairs = torchtitan.pairs_of(["rowwise"], ["debugmodel"], ["float32"], experts, 8, batch=1, length=32)
        for way, first, other in pairs:
            assert way == "noise" or first.processes == 8
            assert (first.tp, first.ep) == kinds.get(way, (first.tp, first.ep))
            # Both train on the same tokens.
            assert first.processes // first.tp * first.batch == other.processes // other.tp * other.batch
            assert first.length == other.length == 32
        gathers = [(first.tp, first.ep) for way, first, _ in pairs if way == "gather"]
        assert gathers == [(1, 1), (2, 4 if experts else 1)]


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

    found = trainer._summary([row(1, 5.0, 3.0), row(10, 50.0, 9.0), row(20, 70.0, 4.0), row(30, 80.0, 4.0)], 10**10)
    assert found["tokens_per_second"] == 75.0
    assert found["tflops"] == 0.75
    assert (found["peak_gib"], found["logged_steps"]) == (9.0, [1, 10, 20, 30])
    # Of 60 steps the last 40 are timed.
    long = [row(10 * window, speed, 1.0) for window, speed in enumerate((5.0, 1.0, 20.0, 30.0, 40.0, 60.0), 1)]
    assert trainer._summary(long, 10**10)["tokens_per_second"] == 35.0


def test_unknown_whole_models_are_refused():
    with pytest.raises(ValueError, match=r"the model must be one of debug, debug-moe, 8b, 70b, 30b-a3b(.|\n)*got '9b'"):
        config.config_of(config.Whole("9b", "bf16"), "")


def whole_row(losses, contender="rowwise", **options):
    whole = {"deterministic": True, **options}
    return {**dataclasses.asdict(config.Whole("debug", contender, **whole)), "losses": list(losses)}


@pytest.mark.parametrize(("rows", "changed"), [
    ([whole_row((4.0, 3.0)), whole_row((4.0, 3.0), gather=False)], []),
    ([whole_row((4.0, 3.0)), whole_row((4.0, 3.0000001), gather=False)], ["gather"]),
    ([whole_row((4.0, 3.0), ep=4), whole_row((4.0, 3.1), ep=4, payload="high_precision")], []),
    ([whole_row((4.0, 3.0), ep=4), whole_row((4.1, 3.0), ep=4, payload="high_precision")], ["payload"]),
    ([whole_row((4.0,), "torchao tensorwise"), whole_row((4.1,), "torchao tensorwise", gather=False)], []),
    # Other layouts sum in another order, and speeds are measured without deterministic kernels.
    ([whole_row((4.0, 3.0)), whole_row((4.1, 3.1), tp=2)], []),
    ([whole_row((4.0, 3.0), deterministic=False), whole_row((4.1, 3.1), deterministic=False, gather=False)], []),
])  # fmt: skip
def test_neither_the_gather_nor_the_payload_may_change_losses(rows, changed):
    assert [text.split()[0] for text in trainer.differing(rows)] == changed


def test_layouts_are_joined():
    found = config.wholes_of("debug", ["tp+ep4+exact", "wide"], ["bf16", "rowwise"], {"processes": 8})
    assert [each.contender for each in found] == ["bf16", "rowwise"] * 2
    assert found[1] == config.Whole("debug", "rowwise", tp=2, ep=4, payload="high_precision", processes=8)
    assert found[3] == config.Whole("debug", "rowwise", gather=False, processes=8)
    with pytest.raises(ValueError, match="layout must be one of (.|\n)*got 'dp'"):
        config.wholes_of("debug", ["fsdp+dp"], ["bf16"], {})


class Layers(nn.Module):
    """Two layers, and a head that ``convert`` leaves."""

    def __init__(self):
        super().__init__()
        self.layers, self.lm_head = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)]), nn.Linear(32, 32)


@pytest.mark.parametrize(("losses", "unchanged", "lost", "failed"), [
    (((4.0, 3.0),) * 2, ([], []), ([], []), []),
    (((4.0, 3.0), (4.0, 3.1)), ([], []), ([], []), ["ranks log different losses"]),
    (((4.0, math.nan),) * 2, ([], []), ([], []), ["losses that are not finite"]),
    (((4.0, 3.0),) * 2, ([], []), ([], ["norm"]), ["not finite: norm"]),
    (((4.0, 3.0),) * 2, (["norm"], ["norm"]), ([], []), ["no step changed norm"]),
])  # fmt: skip
def test_failures_of_a_whole_model_on_some_rank(losses, unchanged, lost, failed):
    pytest.importorskip("torchtitan")
    model, whole = Layers(), config.Whole("debug", "rowwise")
    plain = trainer._checks(whole, model, losses, unchanged, lost)["failures"]
    assert plain[-1 - bool(lost[1])] == "rowwise: not converted: layers.0, layers.1"
    tritonfp8.convert(model, "rowwise", filter=["layers.*"])
    found = trainer._checks(whole, model, losses, unchanged, lost)
    assert found["converted"] == 2
    assert len(found["failures"]) == len(failed)
    assert all(text.endswith(end) for text, end in zip(found["failures"], failed, strict=True))
