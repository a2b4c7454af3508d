"""Repeated plans give the driver what Triton's own launches give it. The driver is a stub that writes it down."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import stub

HERE = Path(__file__).parent


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc to build a stub of the CUDA driver")
def test_replays_are_the_launches_that_they_repeat(tmp_path):
    environment = stub.environment(tmp_path)
    done = subprocess.run(
        [sys.executable, HERE / "replay_on_stub.py"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-20000:]
    assert int(re.search(r"(\d+) replayed, 0 different", done.stdout)[1]) > 50
