"""Compile every kernel with every supported triton: runs tests/compile_only once per version (``make versions``).

    python tests/support/kernels/every_triton.py [version ...] [-- arguments of pytest]

All versions use the same torch, because nothing runs on a GPU.
"""

import os
import subprocess
import sys
from pathlib import Path

from tritonfp8.compat.versions import TRITON_OF_TORCH

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".tritons"


def installed(version):
    """The folder that has only this triton; pip installs it if it is missing."""
    folder = FOLDER / version
    if not (folder / "triton").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder]
        subprocess.run([*command, f"triton=={version}.*"], check=True)
    return folder


def compiles(version, arguments):
    """Whether all kernels compile with this triton, within the limits of the tests."""
    path = os.pathsep.join(map(str, (installed(version), ROOT)))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"}
    environment["TRITON_CACHE_DIR"] = str(FOLDER / f"cache-{version}")
    found = subprocess.run(
        [sys.executable, "-c", "import triton; print(triton.__version__)"],
        env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert found.stdout.startswith(f"{version}."), f"triton {found.stdout} is found before {version}"
    print(f"triton {found.stdout.strip()}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/compile_only", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def main(arguments):
    versions, _, pytest_arguments = " ".join(arguments).partition("--")
    wanted = versions.split() or list(dict.fromkeys(TRITON_OF_TORCH.values()))
    failed = [version for version in wanted if not compiles(version, pytest_arguments.split())]
    print(f"triton {', '.join(wanted)}: {'failed: ' + ', '.join(failed) if failed else 'all compile'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
