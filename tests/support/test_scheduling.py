"""How tests are distributed: groups stay together, what takes long begins first, and CI's steps run each file once."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import scheduling
import torch

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
SCRIPT = (ROOT / ".ci" / "run").read_text()
# What runs tests. A collection runs none.
STEPS = re.compile(r"^pytest\b(?! --collect-only)(.*)$", re.MULTILINE)
FILES = {path.relative_to(ROOT).as_posix() for path in TESTS.rglob("test_*.py")}
TEST = """
import os
import pytest

@pytest.mark.parametrize("i", range(6))
def test_worker(i):
    with open({path!r}, "a") as file:
        file.write(os.environ["PYTEST_XDIST_WORKER"] + "\\n")
"""


def test_a_group_of_files_runs_in_one_worker(tmp_path):
    """Nothing else would tell: without groups all tests pass as well, only later."""
    seen = {name: tmp_path / f"{name}.txt" for name in ("one", "other", "free")}
    for name, path in seen.items():
        mark = '\npytestmark = pytest.mark.xdist_group("both")\n' if name != "free" else ""
        (tmp_path / f"test_{name}.py").write_text(TEST.format(path=str(path)) + mark)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    # The process inside is no worker of the one outside.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    # Plugins of other packages take seconds to import, in three processes.
    environment |= {"PYTHONPATH": str(SUPPORT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    plugins = ["-pxdist", "-pscheduling", "-pno:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-n2", "--dist=loadgroup", *plugins]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    workers = {name: set(path.read_text().split()) for name, path in seen.items()}
    assert workers["one"] == workers["other"]
    assert len(workers["one"]) == 1
    assert "18 passed" in done.stdout


def test_groups_are_those_of_the_marks():
    assert scheduling.group_of(TESTS / "distributed" / "fsdp" / "test_fsdp.py") == "ranks"
    assert scheduling.group_of(TESTS / "specs" / "test_formats.py") is None


def test_what_begins_first_exists():
    assert all((TESTS / name).exists() for name in scheduling.FIRST)


def step(options):
    """The test files that ``pytest`` runs with these options: folders, and ``--ignore`` of folders."""
    ignored = {option.removeprefix("--ignore=") for option in options if option.startswith("--ignore=")}
    folders = [option for option in options if not option.startswith("-")]
    others = [option for option in options if option.startswith("-") and not option.startswith("--ignore=")]
    assert not others, f"tests could fall out by {others}"
    assert all((ROOT / folder).is_dir() for folder in (*ignored, *folders)), options

    def within(file, chosen):
        return any(file.startswith(f"{folder}/") for folder in chosen)

    return {file for file in FILES if within(file, folders or ["tests"]) and not within(file, ignored)}


def not_run_once(script):
    """How often each test file runs, of files that do not run exactly once."""
    runs = Counter(file for options in STEPS.findall(script) for file in step(options.split()))
    return {file: runs[file] for file in FILES if runs[file] != 1}


def test_each_file_runs_once():
    assert len(STEPS.findall(SCRIPT)) == 2
    assert not_run_once(SCRIPT) == {}


@pytest.mark.parametrize(
    ("old", "new", "file", "runs"),
    [
        ("pytest tests/clients tests/notebooks", "pytest tests/clients", "tests/notebooks/test_notebooks.py", 0),
        (" --ignore=tests/notebooks", "", "tests/notebooks/test_notebooks.py", 2),
        ("--ignore=tests/clients ", "--ignore=tests/clients --ignore=tests/cli ", "tests/cli/test_app.py", 0),
    ],
)
def test_a_file_that_a_step_misses_or_repeats_is_found(old, new, file, runs):
    assert SCRIPT.count(old) == 1
    assert not_run_once(SCRIPT.replace(old, new))[file] == runs


def test_an_option_that_selects_tests_is_refused():
    with pytest.raises(AssertionError, match="-m"):
        not_run_once(SCRIPT.replace("pytest tests/clients", "pytest -m slow tests/clients"))


@pytest.mark.parametrize("_case", range(2))
def test_random_data_does_not_depend_on_the_tests_before(_case):
    # The first case leaves the generator elsewhere than it found it.
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(0)))
