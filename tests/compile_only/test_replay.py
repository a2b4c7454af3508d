"""Replayed launches give the driver what Triton's own launches give it. The driver is a stub that writes it down."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from triton.backends.nvidia import driver

HERE = Path(__file__).parent
INCLUDE = Path(driver.__file__).parent / "include"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc to build a stub of the CUDA driver")
def test_replays_are_the_launches_that_they_repeat(tmp_path):
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        ["gcc", "-O1", "-shared", "-fPIC", f"-I{INCLUDE}", "-o", library, HERE / "stub_driver.c"], check=True
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "TRITON_LIBCUDA_PATH": str(tmp_path)}
    environment |= {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    # Nothing runs what is compiled.
    environment["DISABLE_LLVM_OPT"] = "1"
    done = subprocess.run(
        [sys.executable, HERE / "replay_on_stub.py"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-20000:]
    assert int(re.search(r"(\d+) replayed, 0 different", done.stdout)[1]) > 60
