"""Nothing outside of a tensor is read or written, by compute-sanitizer."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import hostile_offsets
import pytest

from tritonfp8 import recipes

SANITIZER = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
FOUND = 86

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(SANITIZER is None, reason="needs compute-sanitizer, a part of the CUDA toolkit"),
]


def watched(what):
    sanitizer = [SANITIZER, "--tool", "memcheck", "--error-exitcode", str(FOUND)]
    command = [*sanitizer, sys.executable, hostile_offsets.__file__, what]
    # Each tensor is an allocation of its own: inside a pool, what lies beyond it is another tensor.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    root = Path(hostile_offsets.__file__).parents[3]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("what", "last_line"),
    [("hostile", f"ran {len(hostile_offsets.OFFSETS) * len(recipes.names())}"), ("blocks", "ran blocks")],
)
def test_hostile_offsets_and_scales_beyond_the_last_block_stay_inside(what, last_line):
    done = watched(what)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr
    assert last_line in done.stdout


def test_an_access_outside_would_be_found():
    done = watched("beyond")
    assert done.returncode == FOUND
    assert "Invalid __global__ write" in done.stdout + done.stderr
