"""Runs tests/compile_only in other processes: triton compiles there, where this process may interpret.

One pytest process either interprets kernels or compiles them: which is fixed when triton is imported.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import compile_store
import pytest
import triton
from compile_target import compile_kernel

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "compile_only"
# Files that compile for longer than a process takes to start; the others share one.
LONG = ("test_matmul.py", "test_fused.py", "test_casts.py", "test_matmul_variants.py")
REST = tuple(path.name for path in sorted(FOLDER.glob("test_*.py")) if path.name not in LONG)


@pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled in this process")
def test_this_process_cannot_compile():
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=0"):
        compile_kernel(None, {}, {}, 90)


@pytest.fixture(scope="session")
def reports(tmp_path_factory):
    """A folder that the workers share: a kernel is compiled once, whichever asks first."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "compiled"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", [*((name,) for name in LONG), REST], ids=[*LONG, "rest"])
def test_kernels_compile_without_a_gpu(tmp_path, reports, names):
    # No pytest-xdist variables: the process inside is no worker of the one outside.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), compile_store.FOLDER: str(reports)}
    options = ["-q", "-n0", "-p", "no:cacheprovider", "--timeout=300"]
    command = [sys.executable, "-m", "pytest", *options, *(FOLDER / name for name in names)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(map(str, command))} failed:\n{output}"
    assert re.search(r"\b[1-9]\d* passed", done.stdout), f"nothing ran:\n{output}"
    print(output)
