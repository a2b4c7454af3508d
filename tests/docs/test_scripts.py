"""The scripts of the Makefile find what they import with the PYTHONPATH that it gives them; host times are measured."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = re.findall(r"^\t(?:PYTHONPATH=(\S+) )?\$\(BIN\)/python (\S+\.py)", (ROOT / "Makefile").read_text(), re.M)


def test_the_makefile_has_scripts():
    assert {Path(script).name for _, script in SCRIPTS} == {"mutants.py", "every_triton.py", "write_reports.py"}


@pytest.mark.parametrize(("path", "script"), sorted({*SCRIPTS}))
def test_a_script_imports(path, script):
    program = f"import runpy; runpy.run_path({script!r}, run_name='imported')"
    environment = {**os.environ, "PYTHONPATH": path}
    # As Python does for a script: its folder comes first.
    lines = f"import sys; sys.path.insert(0, {os.path.dirname(script)!r}); {program}"
    done = subprocess.run([sys.executable, "-c", lines], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_host_times_are_measured_without_a_gpu():
    command = [sys.executable, "tests/compile_only/host_time.py", "--rounds", "10"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0].split() == ["tritonfp8"]
    assert len(lines) == 17
    assert all(float(line.split()[-1]) > 0 for line in lines[1:])
