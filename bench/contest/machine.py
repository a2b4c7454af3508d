"""The machine of a measurement, and the format of its data."""

import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import triton

import tritonfp8
from bench.shapes import SMOKE

RESULTS = Path("bench") / "results"


def chosen_sets(names: Iterable[str]) -> list[str]:
    """The named sets of shapes; without names and without a GPU the smoke shapes, which say nothing about speed."""
    return list(names) or ([] if torch.cuda.is_available() else [SMOKE])


def results_folder() -> Path:
    """Folder for the data of this GPU, relative to the root of the checkout."""
    return RESULTS / _device_name().lower().replace(" ", "-")


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe_machine() -> dict:
    """GPU and versions that a figure depends on, without the host name."""
    return {
        "gpu": _device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "torchao": _version("torchao"),
        "transformers": _version("transformers"),
        "tritonfp8": tritonfp8.__version__,
    }


def command_line() -> str:
    """The current command without ``--out``, and of other absolute paths the last part: the rest is of this machine."""
    arguments = iter(sys.argv[1:])
    kept = [a for a in arguments if not (a.startswith("--out=") or (a == "--out" and next(arguments, None)))]
    kept = [Path(a).name if Path(a).is_absolute() else a for a in kept]
    spec = sys.modules["__main__"].__spec__
    program = ["python", "-m", spec.name.removesuffix(".__main__")] if spec else [Path(sys.argv[0]).name]
    return " ".join([*program, *(shlex.quote(a) for a in kept)])


def write_results(path: Path, data: dict) -> None:
    """Write ``data`` as JSON with the machine and the command, one line for each of its ``rows``; all or nothing."""
    header = {"command": command_line(), "machine": describe_machine(), **data}
    rows = ",\n".join(map(json.dumps, header.pop("rows")))
    text = f'{json.dumps(header, indent=1)[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
    print(f"written: {path}")
