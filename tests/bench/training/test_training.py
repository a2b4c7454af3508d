"""Measurements of training runs: what they conclude from losses, and that they go on where they stopped."""

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from bench.models import digest
from bench.training import rounded, schedule, seeds, stored, transposes

pytestmark = pytest.mark.one_in(3)

OPTIONS = {"model": "tiny", "steps": 4, "batch_size": 2, "seq_len": 32}


def run_of(recipe, losses, seed=0, held_out=2.0, text="a text"):
    return seeds.Run(recipe, seed, text, held_out, losses)


def test_each_seed_is_compared_with_bf16_of_that_seed(monkeypatch):
    monkeypatch.setattr(seeds, "MEAN_STEPS", 2)
    runs = [run_of("bf16", [9.0, 1.0, 1.0]), run_of("bf16", [9.0, 2.0, 2.0], seed=1, held_out=4.0)]
    runs += [run_of("rowwise", [0.0, 1.0, 1.5], held_out=2.5), run_of("rowwise", [0.0, 2.0, 1.0], seed=1)]
    assert seeds.judge(runs) == [
        {"recipe": "rowwise", "seed": 0, "difference": 0.25, "held_out": 0.25},
        {"recipe": "rowwise", "seed": 1, "difference": -0.25, "held_out": -0.5},
    ]


def test_runs_on_different_text_are_not_compared():
    with pytest.raises(ValueError, match="rowwise and bf16 of seed 0 were trained on different text"):
        seeds.judge([run_of("bf16", [1.0]), run_of("rowwise", [1.0], text="another")])


def test_only_missing_runs_are_trained_and_each_is_kept(tmp_path, monkeypatch):
    trained = []

    def train(recipe, seed, options):
        trained.append((recipe, seed))
        if seed == 2:
            raise RuntimeError("rowwise, seed 2: out of memory")
        return run_of(recipe, [1.0, 2.0], seed)

    monkeypatch.setattr(seeds, "train", train)
    path = tmp_path / "seeds.json"
    wanted = [("rowwise", 0), ("rowwise", 1), ("rowwise", 2)]
    failed = seeds.collect([run_of("rowwise", [1.0, 2.0])], wanted, OPTIONS, path)
    assert trained == wanted[1:]
    assert failed == ["rowwise, seed 2: out of memory"]
    assert [(run.recipe, run.seed) for run in seeds.resume(path, OPTIONS)] == wanted[:2]
    with pytest.raises(SystemExit, match="give another folder"):
        seeds.resume(path, OPTIONS | {"steps": 5})


def test_a_run_that_did_not_end_is_refused(tmp_path):
    path = tmp_path / "training.json"
    runs = [{"recipe": "bf16", "losses": [1.0]}]
    path.write_text(json.dumps({"settings": {"steps": 3, "seed": 0}, "text": {"sha256": "a"}, "runs": runs}))
    with pytest.raises(RuntimeError, match="bf16 ended after 1 of 3 steps"):
        seeds.read(path, "bf16")


def test_a_process_trains_a_seed():
    run = seeds.train("bf16", 3, OPTIONS | {"data": __file__})
    assert (run.recipe, run.seed, len(run.losses)) == ("bf16", 3, 4)
    assert run.held_out_loss > 0


def test_a_failed_process_is_reported_with_its_output():
    with pytest.raises(RuntimeError, match=r"nonsense, seed 0: exit status 2(.|\n)*no recipe is named 'nonsense'"):
        seeds.train("nonsense", 0, OPTIONS)


def test_plot_has_a_line_for_each_run(tmp_path, monkeypatch):
    monkeypatch.setattr(seeds, "MEAN_STEPS", 2)
    runs = [run_of("bf16", [1.0, 1.0, 1.0]), run_of("rowwise", [1.0, 1.1, 1.2])]
    seeds.plot(runs, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000


def schedule_runs(**changes):
    base = [3.0, 2.0] + [1.0] * 18
    runs = {
        "bf16": schedule.Run("bf16", losses=base),
        "scheduled": schedule.Run("scheduled", losses=[*base[:2], *[1.5] * 18], compiled={0: 2, 2: 2}, digest="a"),
        "resumed": schedule.Run("resumed", first_step=10, losses=[1.5] * 10, compiled={10: 2, 18: 2}, digest="a"),
    }
    for name, fields in changes.items():
        for field, value in fields.items():
            setattr(runs[name], field, value)
    return runs


def test_a_schedule_is_judged_by_loss_graphs_and_bits():
    found = schedule.judge(schedule_runs(), steps=20)
    assert found["switches"] == [2, 18]
    assert found["difference"] == pytest.approx((2 * 0 + 18 * 0.5) / (3 + 2 + 18))
    assert found["first_stage_equal_to_the_bit"]
    assert found["resumed_equal_to_the_bit"]
    assert found["graphs_after_second_switch"] == 0


@pytest.mark.parametrize(
    ("changes", "figure", "value"),
    [
        ({"scheduled": {"compiled": {0: 2, 18: 1, 19: 1}}}, "graphs_after_second_switch", 2),
        ({"resumed": {"digest": "b"}}, "resumed_equal_to_the_bit", False),
        ({"resumed": {"losses": [1.5] * 9 + [1.6]}}, "resumed_equal_to_the_bit", False),
        ({"bf16": {"losses": [3.0, 2.1] + [1.0] * 18}}, "first_stage_equal_to_the_bit", False),
    ],
    ids=["graphs", "weights", "losses", "first stage"],
)
def test_what_a_schedule_must_not_do_is_found(changes, figure, value):
    assert schedule.judge(schedule_runs(**changes), steps=20)[figure] == value


def test_weights_that_a_checkpoint_lacks_show():
    model = torch.nn.Linear(2, 2)
    before = digest(model.state_dict())
    assert digest(model.state_dict()) == before
    schedule._scramble(model)
    assert digest(model.state_dict()) != before


def test_losses_of_stored_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "MEAN_STEPS", 2)
    options = ["--model", "tiny", "--steps", "4", "--batch-size", "1", "--seq-len", "16", "--device", "cpu"]
    done = CliRunner().invoke(stored.app, ["loss", "--out", str(tmp_path), "--moments", "fp8", *options])
    assert done.exit_code == 0, done.output
    data = json.loads((tmp_path / "stored-training-tiny-rowwise.json").read_text())
    master, stochastic, nearest = data["rows"]
    assert [row["contestant"] for row in data["rows"]] == list(stored.CONTESTANTS)
    assert len({row["losses"][-1] for row in data["rows"]}) == 3
    assert data["excess"] == stochastic["last"] / master["last"] - 1
    assert 12 <= master["bytes"]["linear"] < 12.01
    for row in (stochastic, nearest):
        assert 3 < row["bytes"]["linear"] < 3.3


def test_bytes_of_a_step_of_stored_weights():
    layers, optimizer = stored.stepped_layers((256, 512), "rowwise", "fp8", "cpu")
    moved = stored.moved_bytes(layers, optimizer) / stored.WEIGHTS
    assert 256 * 512 * (4 + 2 * 3) < moved < 1.02 * 256 * 512 * (4 + 2 * 3)


# Transposes from codes and from values.


def timed(recipe, source, seconds, peak=None):
    found = {"shape": "layers", "recipe": recipe, "from": source, "seconds": seconds}
    return found if peak is None else {**found, "peak_bytes": peak}


def test_figures_above_one_are_faster_and_below_one_smaller():
    rows = [timed("rowwise", "values", 3.0, 100), timed("rowwise", "codes", 2.0, 90), timed("bf16", "", 4.0, 120)]
    (pair,) = transposes.compared(rows)
    assert pair["speed"] == 1.5
    assert pair["memory"] == 0.9
    assert (pair["over_bf16"], pair["memory_over_bf16"]) == (2.0, 0.75)


def test_rows_without_memory_or_bf16_have_no_such_figures():
    (pair,) = transposes.compared([timed("rowwise", "values", 1.0), timed("rowwise", "codes", 2.0)])
    assert pair == {"shape": "layers", "recipe": "rowwise", "speed": 0.5, "memory": None}


def test_the_program_measures_each_contender(tmp_path):
    app = typer.Typer()
    app.command()(transposes.main)
    done = CliRunner().invoke(app, ["--shapes", "tiny with biases", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "geometric mean of models" in done.output
    rows = json.loads((tmp_path / "transposes.json").read_text())["rows"]
    assert [(row["recipe"], row["from"]) for row in rows] == transposes.contenders("model")
    assert all(row["seconds"] > 0 and len(row["rounds"]) == transposes.ROUNDS for row in rows)


def test_bf16_is_compared_after_its_weights_are_rounded_where_the_recipe_rounds(tmp_path):
    options = {"model": "tiny", "seed": 1, "steps": 3, "batch_size": 2, "seq_len": 16, "data": __file__}
    row = rounded.train(options, "cpu")
    assert row["bf16_rounded"] != row["bf16"] != row["mxfp4_weights"]
    # The linear layers of four blocks: attention and MLP. Embeddings and head stay.
    assert row["rounded_weights"] == 4 * (4 * 128 * 128 + 3 * 128 * 512)
