"""Runs tests/compile_only in other processes: triton compiles there, where this process may interpret.

One pytest process either interprets kernels or compiles them: which is fixed when triton is imported.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from compile_target import compile_kernel

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "compile_only"
# Starts a stub of the driver, and compiles for it. The others mostly read committed reports.
REPLAY = "test_replay.py"
OTHERS = tuple(str(path.relative_to(FOLDER)) for path in sorted(FOLDER.rglob("test_*.py")) if path.name != REPLAY)


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled in this process")
def test_this_process_cannot_compile():
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=0"):
        compile_kernel(None, {}, {}, 90)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", [(REPLAY,), OTHERS], ids=[REPLAY, "others"])
def test_kernels_compile_without_a_gpu(tmp_path, names):
    # No pytest-xdist variables: the process inside is no worker of the one outside.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    options = ["-q", "-n0", "-p", "no:cacheprovider", "--timeout=300"]
    command = [sys.executable, "-m", "pytest", *options, *(FOLDER / name for name in names)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(map(str, command))} failed:\n{output}"
    assert re.search(r"\b[1-9]\d* passed", done.stdout), f"nothing ran:\n{output}"
    print(output)
