"""What calls without the dispatcher gain in compiled graphs: ``python -m bench.training.direct_calls [--models SET]``.

Each model of the set (:mod:`bench.shapes`), compiled by layer, is timed in bf16, with ours called directly, and with
ours called through the dispatcher; then the host time of one op in a graph of twenty. On a CPU, use ``--models smoke``.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

import tritonfp8
from bench import shapes
from bench.contest.compare import QUICK, Device
from bench.contest.machine import results_folder, write_results
from bench.contest.peers import COMPILED_VERSIONS
from bench.models import build, compile_layers, inputs, training_step
from tritonfp8 import ops, recipes
from tritonfp8.ops import direct

OPS_IN_GRAPH = 20
HOST_CALLS = 9
DIRECT, DISPATCHER = "direct", "dispatcher"


def compiled_afresh(way: str, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, in which graphs are compiled whose ops are called directly or through the dispatcher."""
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = COMPILED_VERSIONS
    # Caches hold the code of the other way.
    chosen = contextlib.nullcontext() if way == DIRECT else direct.through_the_dispatcher()
    with torch._inductor.config.patch(force_disable_caches=True), chosen:
        return function(*args)


def model_rows(device: Device, shape: shapes.Shape, names: list[str]) -> Iterator[dict[str, Any]]:
    """Forward and backward of a model in bf16 and in each recipe, both ways."""
    x, grad_output = inputs(shape, device.device)
    for name, way in [("bf16", DIRECT), *((name, way) for name in names for way in (DIRECT, DISPATCHER))]:
        model = build(shape, device.device)
        if name != "bf16":
            tritonfp8.convert(model, name)
        compile_layers(model, smoke=False)
        step = training_step(model, model.layers, x, grad_output)
        compiled_afresh(way, step)
        seconds, host = device.settled_seconds(step), device.idle_host_seconds(step, HOST_CALLS)
        yield {"shape": shape.name, "contender": name, "calls": way, "seconds": seconds, "host_seconds": host}
        del model, step
        device.release()


class Graph(NamedTuple):
    """A graph of calls of one op.

    Attributes:
        function: makes the calls; to be compiled.
        argument: of the function.
        calls: the arguments of each call.
    """

    function: Callable[..., Any]
    argument: list[Any]
    calls: list[tuple[Any, ...]]


def graphs_of_ops(device: torch.device, m: int, n: int, k: int) -> dict[str, Graph]:
    """For each op a graph that calls it :data:`OPS_IN_GRAPH` times."""
    spec = recipes.get("rowwise").output.lhs.args
    xs = [torch.randn(m, k, device=device, dtype=torch.bfloat16) for _ in range(OPS_IN_GRAPH)]
    weight = torch.randn(n, k, device=device, dtype=torch.bfloat16)
    pairs, operand = [ops.quantize(x, *spec) for x in xs], ops.quantize(weight, *spec)

    def casts(xs: list[torch.Tensor]) -> list[Any]:
        return [ops.quantize(x, *spec) for x in xs]

    def gemms(pairs: list[Any]) -> list[Any]:
        return [ops.scaled_matmul(*pair, *spec, *operand, *spec) for pair in pairs]

    return {
        "quantize": Graph(casts, xs, [(x, *spec) for x in xs]),
        "scaled_matmul": Graph(gemms, pairs, [(*pair, *spec, *operand, *spec) for pair in pairs]),
    }


def op_rows(device: Device) -> Iterator[dict[str, Any]]:
    """Host time of one op in a graph of :data:`OPS_IN_GRAPH`."""
    graphs = graphs_of_ops(device.device, 128, 768, 768)
    for (name, each), way in itertools.product(graphs.items(), (DIRECT, DISPATCHER)):
        graph, argument = torch.compile(each.function, fullgraph=True), each.argument
        with torch.no_grad():
            compiled_afresh(way, graph, argument)
            seconds = device.idle_host_seconds(lambda graph=graph, argument=argument: graph(argument), 30)
        yield {"op": name, "calls": way, "host_seconds": seconds / OPS_IN_GRAPH}


def main(
    models: Annotated[str, typer.Option(help="A set of bench.shapes with models.")] = "other-models",
    names: Annotated[str, typer.Option("--recipes", help="Names, separated by commas.")] = "rowwise,blockwise",
    out: Annotated[Path | None, typer.Option(help="File. [default: direct_calls.json of this GPU's results]")] = None,
) -> None:
    """Measure, print after each row, and write."""
    device = Device(torch.device("cuda" if torch.cuda.is_available() else "cpu"), QUICK)
    out = out or results_folder() / "direct_calls.json"
    rows: list[dict[str, Any]] = []

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        times = (f"{key} {1e6 * value:.1f} us" for key, value in row.items() if key.endswith("seconds"))
        print(row.get("shape") or row.get("op"), row.get("contender", ""), row["calls"], *times, flush=True)
        write_results(out, {"unit": "seconds", "rows": rows})

    for row in op_rows(device):
        note(row)
    for shape in shapes.select("model", [models]):
        for row in model_rows(device, shape, names.split(",")):
            note(row)


if __name__ == "__main__":
    typer.run(main)
