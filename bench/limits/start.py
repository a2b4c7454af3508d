"""Where the time of the first training step of a process goes, by package: ``python -m bench.limits.start``.

Runs :mod:`bench.first_step` with Python's profiler in new processes: in bf16, in FP8 with empty caches, and in FP8
after ``tritonfp8 warmup``. The profiler makes Python's own code slower, so compare parts, not sums, with the times of
the suite. On a CPU, use ``--smoke``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from bench import shapes
from bench.contest.machine import results_folder, write_results
from bench.suites.test_launch import FIRST_STEP_RECIPE, first_step

STARTS = {"bf16": ("bf16", False), "cold": (FIRST_STEP_RECIPE, False), "after warm-up": (FIRST_STEP_RECIPE, True)}


def main(
    smoke: Annotated[bool, typer.Option(help="A tiny model, not compiled: to test this program.")] = False,
    out: Annotated[Path | None, typer.Option(help="File. [default: start.json of this GPU's results]")] = None,
) -> None:
    """Measure, print each part, and write."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (shape,) = shapes.select("first_step", ["smoke" if smoke else "all"])[:1]
    rows = []
    for name, (recipe, warm_up) in STARTS.items():
        found = first_step(shape, device, recipe, warm_up=warm_up, smoke=smoke, profile=True)
        print(f"{name}: {found['step_seconds']:.2f} s")
        for part, seconds in found["profile"].items():
            rows.append({"start": name, "part": part, "seconds": seconds})
            print(f"  {seconds:7.2f} s  {part}")
        rows.append({"start": name, "part": "all", "seconds": found["step_seconds"]})
    write_results(out or results_folder() / "start.json", {"unit": "seconds, by the profiler", "rows": rows})


if __name__ == "__main__":
    typer.run(main)
