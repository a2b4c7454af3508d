"""How tests are distributed: groups stay together, and what takes long begins first."""

import os
import subprocess
import sys
from pathlib import Path

import scheduling

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
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
    environment["PYTHONPATH"] = str(SUPPORT)
    command = [sys.executable, "-m", "pytest", "-n2", "--dist=loadgroup", "-pscheduling", "-pno:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    workers = {name: set(path.read_text().split()) for name, path in seen.items()}
    assert workers["one"] == workers["other"]
    assert len(workers["one"]) == 1
    assert "18 passed" in done.stdout


def test_groups_are_those_of_the_marks():
    assert scheduling.group_of(TESTS / "distributed" / "fsdp" / "test_fsdp.py") == "ranks"
    assert scheduling.group_of(TESTS / "test_formats.py") is None


def test_what_begins_first_exists():
    assert all((TESTS / name).exists() for name in scheduling.FIRST)
