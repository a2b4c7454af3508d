"""Where the host time of an op in a compiled graph goes: ``python -m bench.limits.host``.

A graph of twenty calls of one op is timed, then the same calls without the graph; then without the launch, by a plan
that launches nothing; then also without new memory, by a plan that returns the same results. The differences are the
parts of a call. On a CPU, use ``--smoke``: there calls have no plan, and so no such parts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer

from bench.contest.compare import FULL, SMOKE_EFFORT, Device
from bench.contest.machine import results_folder, write_results
from bench.training.direct_calls import OPS_IN_GRAPH, Graph, graphs_of_ops
from tritonfp8.compat import torch_private, triton_private
from tritonfp8.launch import executor
from tritonfp8.ops import direct

CALLS = 60
SIZE = (128, 768, 768)
GRAPH, LAUNCH, MEMORY, REST = "graph", "launch", "memory of the results", "rest"
TORCH_LAUNCH = "a launch of torch: Tensor.zero_"


@contextlib.contextmanager
def new_plans() -> Iterator[None]:
    """Plans that are made in this block are not used after it, nor older ones in it."""
    executor.forget()
    try:
        yield
    finally:
        executor.forget()


def no_launches(slots: int, calls: Any) -> Callable[[int, list[Any]], None]:
    """Stands for ``raw_launches``: launches nothing."""
    return lambda stream, addresses: None


def same_memory(device: torch.device) -> Callable[..., torch.Tensor]:
    """Stands for ``empty_strided``: returns the same tensor for the same layout."""
    known: dict[Any, torch.Tensor] = {}

    def allocate(*layout: Any) -> torch.Tensor:
        found = known.get(layout)
        if found is None:
            shape, strides, dtype = layout
            found = known[layout] = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        return found

    return allocate


def calls_of(name: str, calls: list[tuple[Any, ...]]) -> Callable[[], None]:
    """Calls in a loop of Python, by the functions that Inductor's code calls."""
    sites = [direct.site(name) for _ in calls]

    def run() -> None:
        for site, args in zip(sites, calls, strict=True):
            site(*args)

    return run


def parts(device: Device, name: str, each: Graph, smoke: bool) -> dict[str, float]:
    """Host seconds of one call of an op in a graph: all, and its parts."""

    def seconds(run: Callable[[], Any]) -> float:
        run(), run()
        return device.idle_host_seconds(run, 2 if smoke else CALLS) / OPS_IN_GRAPH

    graph = torch.compile(each.function, fullgraph=True, backend="eager" if smoke else "inductor")
    calls = calls_of(name, each.calls)
    found = {"all": seconds(lambda: graph(each.argument)), "calls": seconds(calls)}
    launches = mock.patch.object(triton_private, "raw_launches", no_launches)
    memory = mock.patch.object(torch_private, "empty_strided", same_memory)
    with new_plans(), launches:
        found["no launch"] = seconds(calls)
    with new_plans(), launches, memory:
        found["neither"] = seconds(calls)
    return {
        "all": found["all"],
        GRAPH: found["all"] - found["calls"],
        LAUNCH: found["calls"] - found["no launch"],
        MEMORY: found["no launch"] - found["neither"],
        REST: found["neither"],
    }


def main(
    smoke: Annotated[bool, typer.Option(help="Few calls, not compiled: to test this program.")] = False,
    out: Annotated[Path | None, typer.Option(help="File. [default: host.json of this GPU's results]")] = None,
) -> None:
    """Measure, print each row, and write."""
    device = Device(torch.device("cuda" if torch.cuda.is_available() else "cpu"), SMOKE_EFFORT if smoke else FULL)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for name, each in graphs_of_ops(device.device, *SIZE).items():
            found = parts(device, name, each, smoke)
            rows += [{"op": name, "part": part, "host_seconds": seconds} for part, seconds in found.items()]
        xs = [torch.empty(SIZE[:2], device=device.device) for _ in range(OPS_IN_GRAPH)]
        seconds = device.idle_host_seconds(lambda: [x.zero_() for x in xs], 2 if smoke else CALLS) / OPS_IN_GRAPH
        rows.append({"op": TORCH_LAUNCH, "part": "all", "host_seconds": seconds})
    for row in rows:
        print(f"{row['op']:<32} {row['part']:<24} {1e6 * row['host_seconds']:6.1f} us")
    write_results(
        out or results_folder() / "host.json", {"unit": "host seconds of one call", "size": SIZE, "rows": rows}
    )


if __name__ == "__main__":
    typer.run(main)
