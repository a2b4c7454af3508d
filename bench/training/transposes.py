"""Transposes made from codes beside transposes made from values: ``python -m bench.training.transposes``.

Forward and backward of layers of models, compiled by layer, and of layers of experts: time and peak memory. The
contenders of a shape take turns. Processes that share the GPU compile first, and leave their graphs in the compiler's
cache on disk.
"""

from __future__ import annotations

import itertools
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import tritonfp8
from bench.contest.compare import QUICK, Device
from bench.contest.machine import results_folder, write_results
from bench.contest.peers import COMPILED_VERSIONS
from bench.models import TorchExperts, build, compile_layers, inputs, mixture, training_step
from bench.shapes import SHAPES, Shape
from tritonfp8 import recipes

KINDS = ("model", "experts")
VALUES, CODES, BF16 = "values", "codes", "bf16"
RECIPES = ("rowwise", "blockwise")
ROUNDS = 3
PROCESSES = 10
Step = Callable[[], Any]


def contenders(kind: str) -> list[tuple[str, str]]:
    """Recipes and what their transposes are made from; of experts, torch's in bf16, too."""
    found = list(itertools.product(RECIPES, (VALUES, CODES)))
    return [*found, (BF16, "")] if kind == "experts" else found


def chosen(names: list[str]) -> Iterator[tuple[str, Shape]]:
    """The shapes of these names, by kind."""
    for kind in KINDS:
        yield from ((kind, shape) for shape in SHAPES[kind] if shape.name in names)


def step_of(kind: str, shape: Shape, recipe: str, source: str, device: torch.device) -> Step:
    """Forward and backward, compiled."""
    torch._dynamo.config.recompile_limit = COMPILED_VERSIONS
    found = recipes.get(recipe, transposed_from=source or None)
    backend = "inductor" if device.type == "cuda" else "eager"
    if kind == "experts":
        layer = mixture(shape, device, TorchExperts if recipe == BF16 else tritonfp8.Float8Experts, BF16)
        if recipe != BF16:
            tritonfp8.swap_recipe(layer, found)
        x = torch.randn(shape.size[0], shape.size[3], device=device, dtype=torch.bfloat16).requires_grad_()
        forward = torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)
        return training_step(forward, layer, x, torch.randn_like(x))
    model = build(shape, device)
    tritonfp8.convert(model, found)
    compile_layers(model, smoke=device.type != "cuda")
    return training_step(model, model.layers, *inputs(shape, device))


def warm(names: list[str]) -> None:
    """Compile each contender of each shape in a process of its own."""
    jobs = [(shape.name, f"{recipe},{source}") for kind, shape in chosen(names) for recipe, source in contenders(kind)]

    def run(job: tuple[str, str]) -> int:
        command = [sys.executable, "-m", "bench.training.transposes", "--shapes", job[0], "--compile-only", job[1]]
        return subprocess.run(command, check=False, capture_output=True).returncode

    with ThreadPoolExecutor(PROCESSES) as pool:
        failed = [job for job, code in zip(jobs, pool.map(run, jobs), strict=True) if code]
    if failed:
        print(f"not compiled ahead: {failed}")


def measured(device: Device, kind: str, shape: Shape) -> list[dict[str, Any]]:
    """A row for each contender of a shape."""
    steps, rows = [], []
    for recipe, source in contenders(kind):
        step = step_of(kind, shape, recipe, source, device.device)
        for _ in range(2):
            step()
        before = device.memory()
        step()
        device.synchronize()
        rows.append({"shape": shape.name, "recipe": recipe, "from": source, **device.peak(before)})
        steps.append(step)
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(ROUNDS):
        for step, found in zip(steps, times, strict=True):
            found.append(device.settled_seconds(step))
    for row, found in zip(rows, times, strict=True):
        row |= {"seconds": statistics.median(found), "rounds": found}
    device.release()
    return rows


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By shape and recipe: the time from values over the time from codes, and the peak memory from codes over it."""
    found = {(row["shape"], row["recipe"], row["from"]): row for row in rows}
    pairs = []
    for (shape, recipe, source), codes in found.items():
        if source != CODES:
            continue
        values, base = found[shape, recipe, VALUES], found.get((shape, BF16, ""))
        pair = {"shape": shape, "recipe": recipe, "speed": values["seconds"] / codes["seconds"]}
        pair["memory"] = codes["peak_bytes"] / values["peak_bytes"] if "peak_bytes" in codes else None
        if base is not None:
            pair["over_bf16"] = base["seconds"] / codes["seconds"]
            pair["memory_over_bf16"] = codes["peak_bytes"] / base["peak_bytes"] if "peak_bytes" in codes else None
        pairs.append(pair)
    return pairs


def show(pairs: list[dict[str, Any]]) -> None:
    """Print the table, and the geometric means over models."""
    table = Table(title="from codes, over the same from values")
    names = ("shape", "recipe", "speed", "memory", "over_bf16", "memory_over_bf16")
    for name in names:
        table.add_column(name.replace("_", " "))
    for pair in pairs:
        values = (pair.get(name) for name in names)
        table.add_row(*("" if v is None else v if isinstance(v, str) else f"{v:.4f}" for v in values))
    Console(width=120).print(table)
    for recipe in RECIPES:
        speeds = [pair["speed"] for pair in pairs if pair["recipe"] == recipe and "over_bf16" not in pair]
        if speeds:
            print(f"{recipe}: geometric mean of models {math.prod(speeds) ** (1 / len(speeds)):.4f}")


def main(
    shapes: Annotated[str, typer.Option(help="Names of bench.shapes, separated by commas.")] = (
        "llama 8b layers,hidden 2048 layers,qwen 14b layers,gemma layers,vit h layers,gpt 2 xl layers,"
        "deepseek v3,qwen3 30b"
    ),
    compile_only: Annotated[str | None, typer.Option(help="One contender, as rowwise,codes; nothing is timed.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for transposes.json.")] = None,
) -> None:
    """Compare transposes from codes with transposes from values."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = shapes.split(",")
    if compile_only is not None:
        ((kind, shape),) = chosen(names)
        step_of(kind, shape, *compile_only.split(",", 1), device)()
        return
    if device.type == "cuda":
        warm(names)
    clock, rows = Device(device, QUICK), []
    for kind, shape in chosen(names):
        rows += measured(clock, kind, shape)
        pairs = compared(rows)
        write_results((out or results_folder()) / "transposes.json", {"found": pairs, "rows": rows})
    show(pairs)


if __name__ == "__main__":
    typer.run(main)
