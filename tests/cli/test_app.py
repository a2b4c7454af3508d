import dataclasses
import inspect
import io
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import tritonfp8
from tritonfp8 import recipes, training
from tritonfp8.cli import console
from tritonfp8.cli import warmup as warmup_command
from tritonfp8.cli.console import Bars, console_of
from tritonfp8.warmup import run as warmup

# What the command calls, and what it could have done; tests put others in its place.
WARM_UP = warmup.warm_up
REPORT = warmup.Report(compiled=5, skipped=0, tuned=0, failed=(), seconds=1.0)
COMMAND = [sys.executable, "-m", "tritonfp8"]


def test_recipes_are_listed_and_described(invoke):
    listed = invoke("recipes").output
    for name in recipes.names():
        assert name in listed
        assert invoke("recipes", name).output.strip() == recipes.describe(name)
    assert math.inf > console_of().width >= 160
    unknown = invoke("recipes", "mxfp9")
    assert unknown.exit_code == 2
    assert "did you mean 'mxfp8'" in unknown.stderr


@pytest.mark.parametrize(("command", "lines"), [("recipes", 30), ("doctor", 60)])
def test_tables_fit_a_terminal_of_100_columns(invoke, monkeypatch, command, lines):
    monkeypatch.setattr(console, "PLAIN_WIDTH", 100)
    found = invoke(command).output.splitlines()
    assert max(map(len, found)) <= 100
    assert len(found) <= lines
    for name in recipes.names():
        assert any(name in line for line in found)


@pytest.mark.parametrize("command", ["train", "verify"])
def test_commands_say_the_same_of_a_model_and_a_device_that_do_not_exist(invoke, command):
    assert "no model is named 'tinny', and no file or folder has this path; did you mean 'tiny'?" in " ".join(
        invoke(command, "--model", "tinny").stderr.split()
    )
    assert "device 'cuda:99' does not exist: torch" in invoke(command, "--device", "cuda:99").stderr


def test_version_of_the_command_and_of_the_module(invoke):
    assert invoke("--version").output.strip() == f"tritonfp8 {tritonfp8.__version__}"
    module = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert module.stdout == invoke("--version").output


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"]])
def test_help_and_version_come_without_torch(invoke, arguments):
    lines = "import sys, tritonfp8_command as command", "try: command.main()"
    program = "\n".join([*lines, "finally: assert not {'torch', 'tritonfp8'} & {*sys.modules}"])
    run = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert "AssertionError" not in run.stderr
    whole = invoke(*arguments)
    # The test of the whole command calls it by another name.
    assert run.stdout.split() == whole.output.replace("Usage: root", "Usage: tritonfp8").split()
    assert run.returncode == whole.exit_code


def test_help_names_the_defaults_of_each_device(invoke):
    text = " ".join(re.sub("[│╭╮╰╯─]", " ", invoke("train", "--help").output).split())
    for device, defaults in training.DEFAULTS.items():
        assert f"{defaults.steps} on {device}" in text
        assert f"{defaults.seq_len} on {device}" in text


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
        more = ["--tune", "--force", "--dtype", "float16", "--model", "tiny", "--tokens", "2x64"]
        more += ["--tokens", 128]
        assert invoke(*layers, *more, "--device", "cuda:1", "--timeout", 9).exit_code == 0
        progress, shapes = given.pop("progress"), given.pop("shapes")
        assert callable(progress)
        assert shapes == layers[2]
        assert given == {
            "model": "tiny", "recipes": ["rowwise"], "tokens": [(2, 64), (1, 128)], "dtype": "float16",
            "tune": True, "force": True, "workers": 0, "device": "cuda:1", "timeout": 9.0,
        }  # fmt: skip
        assert given.keys() | {"progress", "shapes", "timer"} == inspect.signature(WARM_UP).parameters.keys()
        # The command has the function's defaults.
        given.clear()
        assert invoke("warmup").exit_code == 0
        for name, parameter in inspect.signature(WARM_UP).parameters.items():
            if name in given and name != "progress":
                default = parameter.default
                assert given[name] == (list(default) if isinstance(default, tuple) else default)

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
            (["--recipes", ","], "at least one recipe is needed"),
            (["--tokens", "4xx8"], "sequences x tokens a sequence"),
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
        with Bars(console) as bars:
            bars("compile", 3, 12)
        shown = console.export_text()
        assert "compile" in shown
        assert "3/12" in shown
        assert "ETA" in shown

    def test_the_script_for_a_launcher_is_the_command(self):
        script = runpy.run_path(str(Path(__file__).resolve().parents[2] / "bench" / "warm_up.py"))
        assert script["warmup"] is warmup_command.warmup
