"""Predict a training step on 8 to 2,048 GPUs from the measured kernels of one: ``python -m bench.scale``.

A model, a recipe and a layout give one table. Without a model, ``--runs`` writes the predictions that the pages show.
``--check`` compares with what GPUs measured, and with four gloo ranks of this machine. ``--count`` counts the bytes of
small models again.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from bench.contest.machine import RESULTS, write_results
from bench.scale import check, gloo, traffic
from bench.scale.network import Network
from bench.scale.runs import RUNS
from bench.scale.sources import CONSTANTS
from bench.scale.step import EXPOSED, Layout, predict
from bench.tables import seconds_text, table
from tritonfp8.specs.checks import require

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
FOLDER = RESULTS / "scale"
NVLINK, NIC = (CONSTANTS[name].value for name in ("NVLink, one direction", "network of a GPU"))


def _numbers(text: str) -> list[int]:
    if not all(part.isdecimal() for part in text.split(",")):
        raise ValueError(f"gpus must be numbers separated by commas, such as 8,64,2048; got {text}")
    return [int(part) for part in text.split(",")]


def rows_table(rows: list[dict[str, Any]]) -> str:
    """A line for each prediction: the step, its speed, and the exposed seconds."""
    lines = [
        (
            str(row["gpus"]), seconds_text(row["seconds"]), f"{row['tokens_a_second_a_gpu']:,.0f}",
            *(f"{row['parts'][part] / row['seconds']:.1%}" for part in EXPOSED),
            f"{row['state_bytes'] / 1e9:.1f} GB{'' if row['state_fits'] else ', too many'}",
        )
        for row in rows
    ]  # fmt: skip
    return table(("GPUs", "step", "tokens/s/GPU", *EXPOSED, "parameters, gradients, moments"), lines)


def compared_table(found: list[check.Compared]) -> str:
    """A line for each comparison; those outside of the band have the reason."""
    lines = (
        (each.what, f"{each.ratio:.3f}", each.source, "" if each.holds else check.OUTSIDE.get(each.what, "**unknown**"))
        for each in found
    )
    return table(("what", "predicted / measured", "measured in", "outside the band"), lines)


def run_check(out: Path) -> None:
    """Print and write predicted over measured."""
    found, ranks = check.all_compared(), gloo.measured()
    times, sizes = gloo.fitted(ranks["seconds"]), gloo.same_bytes(ranks["blocks"])
    print(compared_table(found))
    header = ("gloo, 4 ranks", "bytes", "predicted / measured")
    print(table(header, ((r["kind"], str(r["size"]), f"{r['predicted'] / r['seconds']:.3f}") for r in times)))
    print(f"bytes of a block on 4 ranks equal: {sum(r['bytes'] == r['predicted'] for r in sizes)} of {len(sizes)}")
    rows = [{**each._asdict(), "ratio": each.ratio, "holds": each.holds} for each in found]
    published = check.published()
    write_results(
        out / "check.json",
        {"band": check.BAND, "gloo_seconds": times, "gloo_bytes": sizes, "published": published, "rows": rows},
    )


@app.command(help=__doc__)
def main(
    model: Annotated[str | None, typer.Option(help="llama3-8b, llama3-70b, qwen3-30b-a3b, 1b or 8b-slice.")] = None,
    recipe: Annotated[str, typer.Option(help="bf16, rowwise, tensorwise or blockwise.")] = "rowwise",
    gpus: Annotated[str, typer.Option(help="Numbers, separated by commas.")] = "8,64,512,2048",
    tp: Annotated[int, typer.Option(help="Ranks that share a layer.")] = 1,
    ep: Annotated[int, typer.Option(help="Ranks that share the experts of a layer.")] = 1,
    shard: Annotated[int | None, typer.Option(help="Ranks that share parameters (HSDP). [default: all]")] = None,
    gather: Annotated[bool, typer.Option(help="Gather weights in 8 bits.")] = False,
    reshard: Annotated[bool, typer.Option(help="Gather weights again in backward.")] = True,
    amax: Annotated[str, typer.Option(help="One reduction of amaxes a model, or a layer.")] = "model",
    batch: Annotated[int, typer.Option(help="Sequences of a data-parallel rank.")] = 1,
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 8192,
    recompute: Annotated[str, typer.Option(help="none, selective or full.")] = "none",
    nvlink: Annotated[float, typer.Option(help="Bytes a second of a GPU inside a machine, one direction.")] = NVLINK,
    nic: Annotated[float, typer.Option(help="Bytes a second of a GPU between machines, one direction.")] = NIC,
    latency: Annotated[float, typer.Option(help="Factor of NCCL's latencies.")] = 1.0,
    runs: Annotated[str | None, typer.Option(help="Write a set of predictions: scaling or eight.")] = None,
    checked: Annotated[bool, typer.Option("--check", help="Compare with what was measured.")] = False,
    count: Annotated[bool, typer.Option("--count", help="Count the bytes of small models again (minutes).")] = False,
    out: Annotated[Path, typer.Option(help="Folder.")] = FOLDER,
) -> None:
    try:
        network = Network(nvlink, nic, latency=latency)
        if count:
            write_results(out / traffic.FILE.name, {"rows": traffic.count()})
        if checked:
            run_check(out)
        if runs is not None:
            require("runs", runs, tuple(RUNS))
            rows = [each.row(network) for each in RUNS[runs]()]
            write_results(out / f"{runs}.json", {"network": vars(network), "rows": rows})
        if model is not None:
            layouts = [Layout(n, tp, ep, shard, gather, reshard, amax) for n in _numbers(gpus)]
            print(rows_table([predict(model, recipe, each, batch, sequence, network, recompute) for each in layouts]))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not (model or runs or checked or count):
        raise typer.BadParameter("give --model, --runs, --check or --count")
