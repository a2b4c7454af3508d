"""The machine and what is installed on it, as plain data to be stored with measurements."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "triton", "torchao", "transformers", "matplotlib", "numpy")
MISSING = "-"
"""What tables and reports show in place of a value that is missing."""


def versions() -> dict[str, str | None]:
    """Versions of Python, this package and the packages it works with; None for one that is not installed."""
    package = __name__.partition(".")[0]
    found: dict[str, str | None] = {"python": platform.python_version(), package: sys.modules[package].__version__}
    for package in PACKAGES:
        found[package] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found | {"cuda": torch.version.cuda}


def machine(device: torch.device | str) -> dict[str, Any]:
    """The device and its host as plain data, to be stored with measurements."""
    device = torch.device(device)
    cores = len(os.sched_getaffinity(0))
    facts: dict[str, Any] = {"name": f"{_cpu_name()}, {cores} cores", "system": platform.platform()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "name": properties.name,
            "capability": [properties.major, properties.minor],
            "memory_bytes": properties.total_memory,
            "driver": _driver(),
        }
    return facts | {"cpu": _cpu_name(), "cores": cores}


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        if match := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return match[1]
    return platform.machine()


def _driver() -> str | None:
    with contextlib.suppress(OSError):
        if match := re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", Path("/proc/driver/nvidia/version").read_text()):
            return match[1]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]
    return None
