"""A training step of blocks of a model, compiled and eager, and its host time: ``python -m bench.limits.step``.

Blocks of the models of sets (:mod:`bench.shapes`), forward and backward: in bf16 and by recipes, each compiled by
block, as a CUDA graph, and eager. A row has the seconds of a step, the host seconds of a step that finds the GPU idle,
and how many layers follow the recipe: with ``--filter auto`` these may be none.

With ``--parts`` also how often graphs of Inductor call us, how many kernels of ours a step launches, and the parts of
its host time: in the graphs; in their calls of ours; in launches, and for memory. A call that a graph leaves to the
function for any layouts counts twice. On a CPU, use ``--models smoke``.
"""

from __future__ import annotations

import collections
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer

import tritonfp8
from bench import shapes
from bench.contest.compare import QUICK, SMOKE_EFFORT, Device
from bench.contest.machine import results_folder, write_results
from bench.models import build, compile_layers, inputs, training_step
from bench.training.direct_calls import HOST_CALLS
from tritonfp8.advice import captured
from tritonfp8.compat import torch_private, triton_private
from tritonfp8.launch import executor
from tritonfp8.ops import direct

BF16 = "bf16"
COMPILED, GRAPH, EAGER = "compiled by block", "CUDA graph", "eager"
WAYS = (COMPILED, GRAPH, EAGER)
CALLS, LAUNCHES, GRAPHS, MEMORY = "calls of ours", "launches of ours", "graphs", "memory of ours"
Times = dict[str, list[float]]


@contextlib.contextmanager
def noted() -> Iterator[Times]:
    """The host seconds of each call of what the parts are about; graphs must be compiled inside the block."""
    times: Times = collections.defaultdict(list)

    def timed(part: str, function: Callable[..., Any], count: int = 1) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            times[part] += [(time.perf_counter() - start) / count] * count
            return result

        return run

    from torch._inductor.output_code import CompiledFxGraph

    launches, memory, site = triton_private.raw_launches, torch_private.empty_strided, direct.site
    own = {name: timed(CALLS, function) for name, function in vars(direct.CALLS).items()}
    executor.forget()
    with (
        mock.patch.object(direct, "site", lambda name: timed(CALLS, site(name))),
        mock.patch.dict(vars(direct.CALLS), own),
        mock.patch.object(
            triton_private,
            "raw_launches",
            lambda slots, calls: timed(LAUNCHES, launches(slots, calls), len(calls)),
        ),
        mock.patch.object(torch_private, "empty_strided", lambda device: timed(MEMORY, memory(device))),
        mock.patch.object(CompiledFxGraph, "__call__", _method(timed, CompiledFxGraph.__call__)),
    ):
        yield times
    executor.forget()


def _method(timed: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    run = timed(GRAPHS, function)
    return lambda self, *args: run(self, *args)


def step_of(
    shape: shapes.Shape, device: Device, name: str, way: str, filter: str | None
) -> tuple[Callable[[], Any], int]:
    """Forward and backward of a model by a recipe, or in bf16; and how many layers follow the recipe."""
    *_, batch, sequence = shape.size
    x, grad_output = inputs(shape, device.device)
    model, converted = build(shape, device.device), 0
    if name != BF16:
        converted = len(tritonfp8.convert(model, name, filter=filter, tokens=batch * sequence).converted)
    if way != EAGER:
        compile_layers(model, smoke=not device.effort.seconds)
    step = training_step(model, model.layers, x, grad_output)
    step(), step()
    if way != GRAPH or device.device.type != "cuda":
        return step, converted
    graph, results = captured(step)
    # The graph does not own its parameters, which the step keeps.
    return lambda: (graph.replay(), results, step), converted


def counted(step: Callable[[], Any], times: Times) -> dict[str, float]:
    """How often a step calls us and launches, and the seconds of each part, without those inside of another one."""
    for _ in range(3):
        step()
    times.clear()
    start = time.perf_counter()
    step()
    found: dict[str, float] = {"seconds with parts": time.perf_counter() - start}
    found |= {f"{part} seconds": sum(times[part]) for part in (GRAPHS, CALLS, LAUNCHES, MEMORY)}
    return found | {part: len(times[part]) for part in (CALLS, LAUNCHES)}


def rows_of(
    shape: shapes.Shape, device: Device, names: list[str], way: str, filter: str | None
) -> list[dict[str, Any]]:
    """A row for each contender: rounds in turn, medians."""
    made = {name: step_of(shape, device, name, way, filter) for name in names}
    steps = {name: step for name, (step, _) in made.items()}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(device.effort.rounds):
        for name, step in steps.items():
            seconds[name].append(device.settled_seconds(step))
    return [
        {
            "shape": shape.name, "size": shape.size, "contender": name, "way": way, "converted": made[name][1],
            "seconds": statistics.median(seconds[name]), "rounds": seconds[name],
            "host_seconds": device.idle_host_seconds(step, HOST_CALLS),
        }
        for name, step in steps.items()
    ]  # fmt: skip


def parts_of(shape: shapes.Shape, device: Device, name: str, way: str, filter: str | None) -> dict[str, float]:
    """Fields of a row: what a step calls and launches, and the parts of its host time."""
    with noted() as times:
        step, _ = step_of(shape, device, name, way, filter)
        device.synchronize()
        return counted(step, times)


def main(
    models: Annotated[str, typer.Option(help="Sets of bench.shapes with models.")] = "diffusion",
    names: Annotated[str, typer.Option("--recipes", help="Separated by commas.")] = "rowwise,tensorwise,blockwise",
    ways: Annotated[str, typer.Option("--ways", help="Separated by commas.")] = ",".join(WAYS),
    only: Annotated[str, typer.Option(help="Begins the names of the models. [default: all of the sets]")] = "",
    filter: Annotated[str | None, typer.Option(help="Of convert: auto.")] = None,
    has_parts: Annotated[bool, typer.Option("--parts", help="Also the parts of the host time.")] = False,
    out: Annotated[Path | None, typer.Option(help="File. [default: step.json of this GPU's results]")] = None,
) -> None:
    """Measure, print after each row, and write."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = Device(torch.device(kind), SMOKE_EFFORT if models == shapes.SMOKE else QUICK)
    rows: list[dict[str, Any]] = []
    for shape in (shape for shape in shapes.select("model", models.split(",")) if shape.name.startswith(only)):
        for way in ways.split(","):
            for row in rows_of(shape, device, [BF16, *names.split(",")], way, filter):
                device.release()
                parts = parts_of(shape, device, row["contender"], way, filter) if has_parts and way != GRAPH else {}
                rows.append(row | parts)
                times = (f"{key} {1e6 * value:.0f} us" for key, value in rows[-1].items() if key.endswith("seconds"))
                print(row["shape"], row["contender"], way, *times, parts.get(CALLS), parts.get(LAUNCHES), flush=True)
                write_results(out or results_folder() / "step.json", {"unit": "seconds of a step", "rows": rows})


if __name__ == "__main__":
    typer.run(main)
