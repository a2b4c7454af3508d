import dataclasses
import functools
import inspect
import io
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
from models import SMALL
from rich.console import Console
from typer.testing import CliRunner

import tritonfp8
from tritonfp8 import recipes, training
from tritonfp8.cli import app
from tritonfp8.cli import warmup as warmup_command
from tritonfp8.cli.console import console_of
from tritonfp8.training import report as training_report
from tritonfp8.warmup import run as warmup
from tritonfp8.workflow import doctor

# What the command calls, and what it could have done; tests put others in its place.
WARM_UP = warmup.warm_up
REPORT = warmup.Report(compiled=5, skipped=0, tuned=0, failed=(), seconds=1.0)
COMMAND = [sys.executable, "-m", "tritonfp8"]


@pytest.fixture
def invoke():
    def run(*args):
        return CliRunner().invoke(app.app, [str(arg) for arg in args])

    return run


@pytest.fixture
def small(tmp_path):
    """Options of a run that takes a second."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALL))
    sizes = ["--steps", 20, "--batch-size", 2, "--seq-len", 20, "--lr", 0.01]
    return ["train", "--model", config, "--data", __file__, "--out", tmp_path / "out", "--device", "cpu", *sizes]


def result_of(folder):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads((folder / "training.json").read_text(), parse_constant=refuse)


def test_train_compares_recipes_and_writes_everything(invoke, small, tmp_path):
    done = invoke(*small, "--recipes", "bf16,rowwise")
    assert done.exit_code == 0, done.output
    assert "speeds mean nothing" in done.output
    assert "bf16: step 20/20, loss" in done.output

    data = result_of(tmp_path / "out")
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
    compared = [
        f"{rowwise[loss]:.4f} | {100 * rowwise[difference]:+.2f} %"
        for loss, difference in (("final_loss", "difference"), ("held_out_loss", "held_out_difference"))
    ]
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


def test_json_names_settings_machine_versions_and_text(invoke, small, tmp_path):
    assert invoke(*small, "--recipes", "bf16", "--seed", 7).exit_code == 0
    data = result_of(tmp_path / "out")
    assert data["settings"]["seed"] == 7
    assert data["settings"]["steps"] == 20
    assert data["command"][0] == "tritonfp8"
    assert data["versions"] == doctor.versions()
    assert data["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert data["text"]["bytes"] + data["text"]["held_out_bytes"] == os.path.getsize(__file__)
    assert data["text"]["held_out_bytes"] > 500
    assert re.fullmatch("[0-9a-f]{64}", data["text"]["sha256"])
    assert data["model"]["linear_flops_a_step"] % (6 * 40) == 0


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
    args = [*map(str, small), "--recipes", "bf16,rowwise", "--steps", "50"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*COMMAND, *args], **pipes) as process:
        for line in process.stdout:
            if "rowwise: step" in line:
                process.kill()
                break
    (run,) = result_of(tmp_path / "out")["runs"]
    assert (run["recipe"], run["steps"]) == ("bf16", 50)


def test_interrupt_before_the_first_step_writes_nothing(invoke, small, tmp_path, monkeypatch):
    def interrupt(job):
        raise KeyboardInterrupt

    monkeypatch.setattr(training.loop, "linear_flops", interrupt)
    done = invoke(*small)
    assert done.exit_code == 130
    assert "nothing was measured" in done.output
    assert list((tmp_path / "out").iterdir()) == []


def test_ctrl_c_ends_the_process_with_its_report(small, tmp_path):
    args = [*map(str, small), "--recipes", "bf16,rowwise", "--steps", "1000"]
    # A shell lets its background jobs ignore SIGINT, and their children inherit that.
    listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*COMMAND, *args], preexec_fn=listen, **pipes) as process:
        for line in process.stdout:
            if "step 100/1000" in line:
                process.send_signal(signal.SIGINT)
                break
        output = process.stdout.read()
    assert process.returncode == 130, output
    assert "Interrupted: the figures cover the finished steps." in output
    (run,) = result_of(tmp_path / "out")["runs"]
    assert 100 <= run["steps"] < 1000
    assert run["interrupted"]


def test_loss_that_is_not_finite_is_named_with_its_step(invoke, small, tmp_path):
    done = invoke(*small, "--recipes", "bf16", "--lr", "1e30")
    (run,) = result_of(tmp_path / "out")["runs"]
    step = run["first_non_finite"]
    assert run["losses"][step - 1] in ("nan", "inf")
    assert run["final_loss"] in ("nan", "inf")
    shown = "NaN" if run["losses"][step - 1] == "nan" else "Inf"
    assert f"{shown} at step {step}" in done.output


def test_failed_recipe_is_shown_and_sets_the_exit_code(invoke, small, tmp_path, monkeypatch):
    def broken(model, recipe):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(training.loop, "convert", broken)
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
        (["--model", "8b"], "no model is named '8b'"),
        (["--data", "no/such/text"], "no/such/text does not exist"),
        (["--seq-len", "50", "--data", "{tmp_path}/short"], "needs at least 51 bytes of text"),
        (["--device", "tpu"], "device must be 'cpu' or 'cuda'"),
        (["--steps", "0"], "steps must be at least 1"),
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
    def missing():
        raise ModuleNotFoundError('training needs matplotlib: pip install "tritonfp8[train]"')

    monkeypatch.setattr(training.settings, "require_train_extra", missing)
    done = invoke(*small)
    assert done.exit_code == 2
    assert 'pip install "tritonfp8[train]"' in done.stderr


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


def test_recipes_are_listed_and_described(invoke):
    listed = invoke("recipes").output
    for name in recipes.names():
        assert name in listed
        assert invoke("recipes", name).output.strip() == recipes.describe(name)
    unknown = invoke("recipes", "mxfp9")
    assert unknown.exit_code == 2
    assert "did you mean 'mxfp8'" in unknown.stderr


def test_version(invoke):
    assert invoke("--version").output.strip() == f"tritonfp8 {tritonfp8.__version__}"


def test_module_is_the_same_command(invoke):
    module = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert module.stdout == invoke("--version").output


def test_help_names_the_defaults_of_each_device(invoke):
    text = " ".join(re.sub("[│╭╮╰╯─]", " ", invoke("train", "--help").output).split())
    for device, defaults in training.DEFAULTS.items():
        assert f"{defaults.steps} on {device}" in text
        assert f"{defaults.seq_len} on {device}" in text


def test_plain_output_is_wide_enough_for_its_cells(invoke):
    longest = max(recipes.names(), key=len)
    assert longest in invoke("recipes").output
    assert math.inf > console_of().width >= 160


class TestWarmUp:
    @pytest.fixture(autouse=True)
    def _home(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    @pytest.fixture
    def layers(self, tmp_path):
        path = tmp_path / "shapes.json"
        path.write_text('[{"m": 64, "n": 48, "k": 32}]')
        return ["warmup", "--shapes", path, "--recipes", "rowwise", "--workers", 0]

    def test_a_cpu_goes_through_the_steps(self, invoke, layers):
        done = invoke(*layers, "--device", "cpu")
        assert done.exit_code == 0, done.output
        lines = done.output.splitlines()
        assert lines[0] == "--device cpu: the reference ops run, and nothing is compiled."
        ops = int(re.search(r"(\d+) ops ready, 0 failures", lines[-1])[1])
        assert lines[1:-1] == [f"compile: {ops}/{ops}", f"load: {ops}/{ops}"]
        assert ops > 5

    def test_every_option_arrives(self, invoke, layers, monkeypatch):
        given = {}
        monkeypatch.setattr(warmup, "warm_up", lambda **options: given.update(options) or REPORT)
        more = ["--tune", "--force", "--dtype", "float16", "--model", "tiny", "--tokens", "2x64", "--tokens", 128]
        assert invoke(*layers, *more, "--device", "cuda:1", "--timeout", 9).exit_code == 0
        progress, shapes = given.pop("progress"), given.pop("shapes")
        assert callable(progress)
        assert shapes == layers[2]
        assert given == {
            "model": "tiny", "recipes": ["rowwise"], "tokens": [(2, 64), (1, 128)], "dtype": "float16", "tune": True,
            "force": True, "workers": 0, "device": "cuda:1", "timeout": 9.0,
        }  # fmt: skip
        assert given.keys() | {"progress", "shapes", "timer"} == inspect.signature(WARM_UP).parameters.keys()

    def test_the_defaults_are_those_of_the_function(self, invoke, layers, monkeypatch):
        given = {}
        monkeypatch.setattr(warmup, "warm_up", lambda **options: given.update(options) or REPORT)
        assert invoke("warmup").exit_code == 0
        for name, parameter in inspect.signature(WARM_UP).parameters.items():
            if name in given and name != "progress":
                assert given[name] == (
                    list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
                )

    def test_failures_are_named_and_set_the_exit_code(self, invoke, layers, monkeypatch):
        report = dataclasses.replace(REPORT, failed=("quantize([1]): its process was ended by SIGKILL",), tuned=3)
        monkeypatch.setattr(warmup, "warm_up", lambda **options: report)
        done = invoke(*layers)
        assert done.exit_code == 1
        assert "5 ops ready, 3 GEMMs tuned, 0 tuned before, 1 failures" in done.output
        assert "failed: quantize([1]): its process was ended by SIGKILL" in done.stderr

    def test_ctrl_c(self, invoke, layers, monkeypatch):
        def interrupt(*args):
            raise KeyboardInterrupt

        monkeypatch.setattr(warmup, "run_jobs", interrupt)
        done = invoke(*layers, "--device", "cpu")
        assert done.exit_code == 130
        assert "finished work is kept" in done.output

    def test_other_ranks_are_silent(self, invoke, layers, monkeypatch):
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setattr(warmup, "warm_up", lambda **options: dataclasses.replace(REPORT, failed=("x",)))
        done = invoke(*layers)
        assert (done.exit_code, done.output) == (1, "")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--shapes", "no/such.json"], "the shapes in no/such.json cannot be read"),
            (["--recipes", "rowise"], "did you mean 'rowwise'"),
            (["--recipes", ","], "at least one recipe is needed"),
            (["--tokens", "4xx8"], "sequences x tokens a sequence"),
            (["--dtype", "int8"], "dtype must be one of"),
            (["--model", "8b"], "no model is named '8b'"),
            (["--device", "cuda:99"], "needs a CUDA GPU with FP8 tensor cores"),
            (["--tune"], "needs a CUDA GPU, or a timer"),
        ],
    )
    def test_bad_input_is_one_clear_error(self, invoke, layers, options, message):
        done = invoke(*layers, "--device", "cpu", *options)
        assert done.exit_code == 2
        assert message in " ".join(done.stderr.split())
        assert "Traceback" not in done.output

    def test_nothing_to_do_is_an_error(self, invoke):
        assert "needs a model or a file of shapes" in invoke("warmup", "--device", "cpu").stderr

    def test_a_terminal_gets_bars_with_an_eta(self):
        console = Console(force_terminal=True, width=120, record=True, file=io.StringIO())
        with warmup_command._Bars(console) as bars:
            bars("compile", 3, 12)
        shown = console.export_text()
        assert "compile" in shown
        assert "3/12" in shown
        assert "ETA" in shown

    def test_the_script_for_a_launcher_is_the_command(self):
        script = runpy.run_path(str(Path(__file__).resolve().parents[2] / "bench" / "warm_up.py"))
        assert script["warmup"] is warmup_command.warmup
