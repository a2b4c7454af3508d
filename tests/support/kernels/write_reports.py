"""Compile every kernel of tests/compile_only and write the reports that are committed (``make reports``)."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import compile_store

ROOT = Path(__file__).resolve().parents[3]


def main():
    with tempfile.TemporaryDirectory() as folder:
        shared = {compile_store.FOLDER: folder, compile_store.FRESH: "1", "TRITON_INTERPRET": "0"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/compile_only"]
        if code := subprocess.run(command, cwd=ROOT, env={**os.environ, **shared}, check=False).returncode:
            return code
        print(f"{compile_store.REPORTS.relative_to(ROOT)}: {compile_store.write(folder)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
