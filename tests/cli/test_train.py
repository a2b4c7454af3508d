"""``tritonfp8 train``: what it prints, writes and refuses."""

import functools
import json
import os
import re
import signal
import subprocess
import sys

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
from models import SMALL

from tritonfp8 import training
from tritonfp8.compat import machine
from tritonfp8.training import report as training_report

pytestmark = pytest.mark.one_in(3)

COMMAND = [sys.executable, "-m", "tritonfp8"]
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


@pytest.fixture
def small(tmp_path):
    """Options of a run that takes a second."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALL))
    sizes = ["--steps", 20, "--batch-size", 2, "--seq-len", 20, "--lr", 0.01]
    return ["train", "--model", config, "--data", __file__, "--out", tmp_path / "out", "--device", "cpu", *sizes]


def raising(error):
    def function(*args, **options):
        raise error

    return function


def result_of(folder):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads((folder / "training.json").read_text(), parse_constant=refuse)


def test_train_compares_recipes_and_writes_everything(invoke, small, tmp_path):
    done = invoke(*small, "--recipes", "bf16,rowwise", "--seed", 7)
    assert done.exit_code == 0, done.output
    assert "speeds mean nothing" in done.output
    assert "bf16: step 20/20, loss" in done.output

    data = result_of(tmp_path / "out")
    assert [data["settings"][name] for name in ("seed", "steps")] == [7, 20]
    assert data["command"][0] == "tritonfp8"
    assert data["versions"] == machine.versions()
    assert data["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert data["text"]["bytes"] + data["text"]["held_out_bytes"] == os.path.getsize(__file__)
    assert data["text"]["held_out_bytes"] > 500
    assert re.fullmatch("[0-9a-f]{64}", data["text"]["sha256"])
    assert data["model"]["linear_flops_a_step"] % (6 * 40) == 0

    bf16, rowwise = data["runs"]
    assert [run["recipe"] for run in data["runs"]] == ["bf16", "rowwise"]
    for run in data["runs"]:
        assert run["steps"] == len(run["losses"]) == len(run["step_seconds"]) == 20
        assert run["final_loss"] == pytest.approx(sum(run["losses"][-2:]) / 2)
        timed = sorted(run["step_seconds"][5:])
        assert run["tokens_per_second"] == pytest.approx(40 / timed[7])
        assert run["failure"] is None
    assert bf16["shares"] == bf16["converted"] == {}
    assert rowwise["shares_of_converted"] == {"reference": 1.0}
    # All but the head, of 256 x 32 weights.
    share = rowwise["shares"]["reference"]
    layers = 2 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 64)
    assert share == pytest.approx(layers / (layers + 256 * 32))
    assert rowwise["difference"] == pytest.approx(rowwise["final_loss"] / bf16["final_loss"] - 1)
    assert rowwise["held_out_difference"] == pytest.approx(rowwise["held_out_loss"] / bf16["held_out_loss"] - 1)
    assert rowwise["speed_up"] is None
    assert rowwise["converted"]["model.layers.0.mlp.up_proj"] == "rowwise"
    assert rowwise["peak_bytes"] is None

    table = (tmp_path / "out" / "table.md").read_text()
    assert f"| bf16 | {bf16['final_loss']:.4f} | - | {bf16['held_out_loss']:.4f} | - |" in table
    pairs = ("final_loss", "difference"), ("held_out_loss", "held_out_difference")
    compared = [f"{rowwise[loss]:.4f} | {100 * rowwise[difference]:+.2f} %" for loss, difference in pairs]
    assert f"| rowwise | {' | '.join(compared)} |" in table
    cell = f"{100 * share:.1f} % (reference)"
    assert f"| {cell} |" in table
    assert "mean of the last 2 steps" in table
    for text in (f"{rowwise['final_loss']:.4f}", cell):
        assert text in done.output
    for text in (table, done.output):
        assert "tokens/s" not in text
        assert "speed-up" not in text
        assert "no speeds: a CPU has no FP8 tensor cores" in " ".join(text.split())


def test_plot_shows_each_recipe_in_its_color(invoke, small, tmp_path):
    assert invoke(*small, "--recipes", "bf16,rowwise,blockwise").exit_code == 0
    image = matplotlib.image.imread(tmp_path / "out" / "loss.png")[..., :3]
    assert image.shape[0] > 600
    assert image.shape[1] > 1000

    def pixels(color):
        return int((np.abs(image - matplotlib.colors.to_rgb(color)).max(-1) < 0.02).sum())

    assert min(pixels("C0"), pixels("C1"), pixels("C2")) > 50
    assert pixels("C3") == 0


def test_without_bf16_nothing_is_compared(invoke, small, tmp_path):
    done = invoke(*small, "--recipes", "rowwise")
    assert done.exit_code == 0
    assert "vs bf16" not in done.output
    assert "speed-up" not in done.output
    assert result_of(tmp_path / "out")["runs"][0]["difference"] is None


def test_interrupt_keeps_what_was_measured(invoke, small, tmp_path, monkeypatch):
    def stepped(self, step, loss, tokens_per_second):
        if (self.recipe, step) == ("rowwise", 12):
            raise KeyboardInterrupt

    monkeypatch.setattr(training.Progress, "stepped", stepped)
    done = invoke(*small, "--recipes", "bf16,rowwise,blockwise")
    assert done.exit_code == 130
    assert "rowwise (12 of 20 steps)" in done.output
    assert "blockwise" not in done.output
    data = result_of(tmp_path / "out")
    bf16, rowwise = data["runs"]
    assert data["interrupted"]
    assert rowwise["steps"] == 12
    # Compared over the same steps: bf16 went on to a lower loss.
    assert rowwise["difference"] == pytest.approx(sum(rowwise["losses"][10:]) / sum(bf16["losses"][10:12]) - 1)
    assert (tmp_path / "out" / "loss.png").stat().st_size > 10_000


def test_killed_run_keeps_the_recipes_before(small, tmp_path):
    with subprocess.Popen([*COMMAND, *map(str, small), "--recipes", "bf16,rowwise"], **PIPES) as process:
        for line in process.stdout:
            if "rowwise: step" in line:
                process.kill()
                break
    (run,) = result_of(tmp_path / "out")["runs"]
    assert (run["recipe"], run["steps"]) == ("bf16", 20)


def test_interrupt_before_the_first_step_writes_nothing(invoke, small, tmp_path, monkeypatch):
    monkeypatch.setattr(training.loop, "linear_flops", raising(KeyboardInterrupt()))
    done = invoke(*small)
    assert done.exit_code == 130
    assert "nothing was measured" in done.output
    assert list((tmp_path / "out").iterdir()) == []


def test_ctrl_c_ends_the_process_with_its_report(small, tmp_path):
    args = [*map(str, small), "--recipes", "bf16,rowwise", "--steps", "300"]
    # A shell lets its background jobs ignore SIGINT, and their children inherit that.
    listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen([*COMMAND, *args], preexec_fn=listen, **PIPES) as process:
        for line in process.stdout:
            if "step 30/300" in line:
                process.send_signal(signal.SIGINT)
                break
        output = process.stdout.read()
    assert process.returncode == 130, output
    assert "Interrupted: the figures cover the finished steps." in output
    (run,) = result_of(tmp_path / "out")["runs"]
    assert 30 <= run["steps"] < 300
    assert run["interrupted"]


def test_loss_that_is_not_finite_is_named_with_its_step(invoke, small, tmp_path):
    done = invoke(*small, "--recipes", "bf16", "--lr", "1e30")
    (run,) = result_of(tmp_path / "out")["runs"]
    step = run["first_non_finite"]
    assert run["losses"][step - 1] in ("nan", "inf")
    assert run["final_loss"] in ("nan", "inf")
    assert step > 1
    assert all(isinstance(loss, float) for loss in run["losses"][: step - 1])
    shown = "NaN" if run["losses"][step - 1] == "nan" else "Inf"
    assert f"{shown} at step {step}" in done.output


def test_failed_recipe_is_shown_and_sets_the_exit_code(invoke, small, tmp_path, monkeypatch):
    monkeypatch.setattr(training.loop, "convert", raising(RuntimeError("out of luck")))
    done = invoke(*small, "--recipes", "bf16,rowwise")
    assert done.exit_code == 1
    assert "rowwise (0 of 20 steps) FAILED" in done.output
    assert "rowwise failed: RuntimeError: out of luck" in done.output
    assert result_of(tmp_path / "out")["runs"][0]["steps"] == 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--recipes", "bf16,blokwise"], "did you mean 'blockwise'"),
        (["--recipes", ","], "at least one recipe is needed"),
        (["--data", "no/such/text"], "no/such/text does not exist"),
        (["--seq-len", "50", "--data", "{tmp_path}/short"], "needs at least 51 bytes of text"),
        (["--out", "{tmp_path}/short"], "results cannot be written to"),
    ],
)
def test_bad_input_is_one_clear_error(invoke, small, tmp_path, options, message):
    (tmp_path / "short").write_text("short")
    done = invoke(*small, *(option.format(tmp_path=tmp_path) for option in options))
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.output
    assert not (tmp_path / "out" / "training.json").exists()


def test_missing_packages_are_one_clear_error(invoke, small, monkeypatch):
    install = 'pip install "tritonfp8[train]"'
    failing = raising(ModuleNotFoundError(f"training needs matplotlib: {install}"))
    monkeypatch.setattr(training.settings, "require_train_extra", failing)
    done = invoke(*small)
    assert done.exit_code == 2
    assert install in done.stderr


def test_result_of_another_run_is_not_overwritten(invoke, small, tmp_path):
    assert invoke(*small, "--recipes", "bf16", "--steps", 1).exit_code == 0
    before = (tmp_path / "out" / "training.json").read_bytes()
    again = invoke(*small, "--recipes", "bf16", "--steps", 1)
    assert again.exit_code == 2
    assert "has the result of another run" in again.stderr
    assert (tmp_path / "out" / "training.json").read_bytes() == before


def test_default_folders_are_new_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training_report.time, "strftime", lambda form: "now")
    folders = [training_report.new_folder(None, "a/model.json") for _ in range(3)]
    assert [str(folder) for folder in folders] == ["runs/model-now", "runs/model-now-2", "runs/model-now-3"]
    assert all(folder.is_dir() and not list(folder.iterdir()) for folder in folders)
