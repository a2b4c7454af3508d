"""Where a measurement was taken, and how its data is written."""

import argparse
import json
import platform
import sys
from pathlib import Path

import torch
import triton

import tritonfp8

RESULTS = Path("bench") / "results"


def results_folder() -> Path:
    """Where the data of this GPU belongs, from the root of the checkout."""
    return RESULTS / torch.cuda.get_device_name().lower().replace(" ", "-")


def describe_machine() -> dict:
    """Names and versions that a figure depends on."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "tritonfp8": tritonfp8.__version__,
    }


def write_results(path: Path, data: dict) -> None:
    """Write ``data`` as JSON, with the machine and the command that made it."""
    command = " ".join(["python", "-m", sys.modules["__main__"].__spec__.name, *sys.argv[1:]])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"command": command, "machine": describe_machine(), **data}, indent=1) + "\n")
    print(f"written: {path}")


def output_path(name: str, description: str) -> Path:
    """Where the command line asks for the data of a measurement; ends with a clear message without a GPU."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, help=f"default: bench/results/<gpu>/{name}.json")
    out = parser.parse_args().out
    if not torch.cuda.is_available():
        sys.exit("this measurement needs a CUDA GPU with FP8 tensor cores; none is here")
    return out or results_folder() / f"{name}.json"
