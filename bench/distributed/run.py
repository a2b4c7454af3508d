"""Train one model on several GPUs with FSDP2, with weights gathered in bf16 and in 8 bits, and with torchao:
``torchrun --nproc-per-node 2 -m bench.distributed --model 1b``.

Reports the bytes of collectives, step time, tokens/s, peak memory and losses of each contestant, from the same weights
on the same text, and the bars. ``--losses`` compares losses to the bit instead of speeds. ``--mesh 1,2`` is tensor
parallelism; ``--losses`` then adds one process, and one process with sums in another order. Without torchrun this
command starts the processes, one per GPU or ``--processes N``. On a CPU they use gloo, and speeds mean nothing.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from bench import tables
from bench.contest.judge import Verdict
from bench.contest.machine import command_line, results_folder, write_results
from bench.distributed.bars import differing_losses, gathered_ratio, judge, loss_difference, mean_losses
from bench.distributed.compare import Row, Settings, as_json, compare, make_deterministic, untimed_steps
from bench.distributed.models import ALONE, GATHER, REORDERED, TP_WAYS, WAYS
from bench.distributed.ranks import AllFailedError, RankError, joined
from tritonfp8 import recipes

FILE = "distributed.json"
CPU_FOLDER = Path("runs") / "bench-distributed"
CPU_PROCESSES = 2
WIDTH = 180
# batch_size and seq_len per data-parallel rank, by model; "" is for other models and for a CPU.
SIZES = {"160m": (16, 1024), "1b": (8, 2048), "": (2, 64)}
STEPS, LOSSES_STEPS = 30, 50
COLUMNS = (
    "contestant", "step", "over bf16", "tokens/s", "peak memory",
    "all-gather", "of bf16", "reduce-scatter", "all-reduce", "last loss", "note",
)  # fmt: skip
QUANTIZED = ",".join(name for name in recipes.names() if recipes.get(name).output.quantized)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def main(
    model: Annotated[str, typer.Option(help="A model of `tritonfp8 train`: tiny, 160m, 1b; or the path of a config.")],
    names: Annotated[str, typer.Option("--recipes", help="Recipes of this package, comma-separated.")] = QUANTIZED,
    steps: Annotated[int | None, typer.Option(help=f"[default: {STEPS}; with --losses {LOSSES_STEPS}]", min=1)] = None,
    rounds: Annotated[int, typer.Option(help="Runs of each contestant; the fastest counts.", min=1)] = 1,
    batch_size: Annotated[int | None, typer.Option(help="Sequences per step and data-parallel rank.", min=1)] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens per sequence.", min=1)] = None,
    mesh: Annotated[
        str | None, typer.Option(help="dp,tp: data-parallel and tensor-parallel ranks. [default: N,1]")
    ] = None,
    losses: Annotated[bool, typer.Option("--losses", help="Compare losses, with deterministic kernels.")] = False,
    peers: Annotated[bool | None, typer.Option(help="Include torchao. [default: not with --losses]")] = None,
    stored: Annotated[
        str | None, typer.Option(help="Add weights stored in 8 bits, with these moments, as bf16,fp8.")
    ] = None,
    ways: Annotated[str, typer.Option(help="Styles of tensor parallelism, comma-separated.")] = ",".join(WAYS),
    compile: Annotated[bool | None, typer.Option(help="Compile each layer. [default: on a GPU]")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. [default: cuda if available]")] = None,
    processes: Annotated[int | None, typer.Option(help="Processes to start without torchrun.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the choice of text.")] = 0,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate. [default: the model's]")] = None,
    data: Annotated[Path | None, typer.Option(help="Text. [default: Python's standard library]")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder. [default: bench/results/<gpu>/distributed-...]")] = None,
) -> None:
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise typer.BadParameter(f"the device must be cpu or cuda; got {kind}")
    if "WORLD_SIZE" not in os.environ:
        sys.exit(_launch(processes or (torch.cuda.device_count() if kind == "cuda" else CPU_PROCESSES)))
    world = int(os.environ["WORLD_SIZE"])
    if processes not in (None, world):
        raise typer.BadParameter(f"--processes {processes} was asked for; the launcher started {world}")
    sizes = SIZES.get(model if kind == "cuda" else "", SIZES[""])
    try:
        dp, tp = _mesh(mesh, world)
        settings = Settings(
            model=model,
            recipes=tuple(names.split(",")),
            steps=steps or (LOSSES_STEPS if losses else STEPS),
            batch_size=batch_size or sizes[0],
            seq_len=seq_len or sizes[1],
            dp=dp,
            tp=tp,
            compile=kind == "cuda" if compile is None else compile,
            peers=not losses if peers is None else peers,
            losses=losses,
            seed=seed,
            data=None if data is None else str(data),
            lr=lr,
            rounds=rounds,
            moments=tuple(stored.split(",")) if stored else (),
            ways=tuple(ways.split(",")),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    _run(settings, kind, out)


def _mesh(given: str | None, world: int) -> tuple[int, int]:
    """``dp, tp`` of ``--mesh``."""
    if given is None:
        return world, 1
    parts = given.split(",")
    if len(parts) != 2 or not all(part.isdecimal() for part in parts) or int(parts[0]) * int(parts[1]) != world:
        raise ValueError(f"--mesh must be dp,tp with dp x tp = {world}, the processes; got {given}")
    return int(parts[0]), int(parts[1])


def _launch(processes: int) -> int:
    """Start this command on ``processes`` ranks; returns the exit code."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    environment = {"OMP_NUM_THREADS": threads, **os.environ}
    return subprocess.call([*launcher, "-m", "bench.distributed", *sys.argv[1:]], env=environment)


def _run(settings: Settings, kind: str, out: Path | None) -> None:
    if settings.losses:
        # Before the first GEMM.
        make_deterministic()
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    path = (out or default_folder(settings, kind)) / FILE
    try:
        with joined(device) as ranks:

            def note(order: str, rows: list[Row]) -> None:
                if ranks.rank == 0:
                    write(path, settings, kind, order, rows)

            order, rows = compare(settings, ranks, device, note)
            if ranks.rank == 0:
                show(settings, kind, order, rows)
    except (AllFailedError, RankError) as error:
        print(f"the run ends here: {error}", file=sys.stderr, flush=True)
        # A normal exit waits for collectives that the other ranks will not join.
        os._exit(1)
    if any("reason" in row for row in rows if row["own"]):
        raise typer.Exit(1)


def default_folder(settings: Settings, kind: str) -> Path:
    """Folder for the data of a run."""
    if kind == "cpu":
        return CPU_FOLDER
    ranks = f"tp{settings.tp}-dp{settings.dp}" if settings.tp > 1 else f"x{settings.dp}"
    others = {"losses": settings.losses, "eager": not settings.compile, f"lr{settings.lr}": settings.lr is not None}
    parts = ["distributed", Path(settings.model).stem, ranks, *(name for name, there in others.items() if there)]
    return results_folder() / "-".join(parts)


def write(path: Path, settings: Settings, kind: str, order: str, rows: list[Row]) -> None:
    """Write the rows so far, with the verdicts of the bars."""
    compare_losses(rows)
    data = {
        "command": f"torchrun --nproc-per-node {settings.dp * settings.tp} {command_line().removeprefix('python ')}",
        **_run_of(settings, kind),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if kind == "cuda" else None,
        "parallelism": _parallelism(settings),
        "parameters": "float32, param_dtype bfloat16, reduce_dtype float32, reshard_after_forward",
        "settings": vars(settings),
        "order": order,
        "untimed_steps": untimed_steps(settings),
        "not_measured_yet": [c.name for c in settings.contestants()[len(rows) :]],
        "bars": [_as_row(verdict) for verdict in judge(rows, _run_of(settings, kind))],
        "rows": rows,
    }
    write_results(path, data)


def show(settings: Settings, kind: str, order: str, rows: list[Row]) -> None:
    """Print the table of results and the table of bars."""
    run = _run_of(settings, kind)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    title = f"{settings.model}, {_parallelism(settings)} on {kind}; {order}"
    console.print(results_table(rows, title, run["deterministic"]))
    console.print(tables.bars_table(judge(rows, run)), markup=False, soft_wrap=True)


def _run_of(settings: Settings, kind: str) -> dict[str, Any]:
    """Facts of a run that the bars depend on. On a CPU torch's own ops are always deterministic."""
    deterministic = settings.losses or kind == "cpu"
    return {"model": settings.model, "device": kind, "tp": settings.tp, "deterministic": deterministic}


def _parallelism(settings: Settings) -> str:
    return f"FSDP2 over {settings.dp}" + (f", tensor parallelism over {settings.tp}" if settings.tp > 1 else "")


def _as_row(verdict: Verdict) -> Row:
    measured = {"measured": as_json(verdict.measured)} if verdict.measured is not None else {"reason": verdict.reason}
    return {"what": verdict.bar.what, "bar": verdict.bar.bar, "holds": verdict.holds, **measured}


def compare_losses(rows: list[Row]) -> None:
    """Add to each row how its losses compare with the losses that they should equal."""
    found = {row["contender"]: row for row in rows}
    for row in rows:
        recipe, _, how = row["contender"].partition(", ")
        if row["own"] and how == GATHER:
            differing = differing_losses(row, found[recipe])
            row["losses_equal_without"] = None if differing is None else differing == 0
        elif how in (*TP_WAYS, REORDERED) and (alone := found.get(f"{recipe}, {ALONE}")):
            row["loss_difference"] = None if (apart := loss_difference(row, alone)) is None else as_json(apart)


def results_table(rows: list[Row], title: str, deterministic: bool) -> Table:
    """Table of results: one line for each contestant."""
    table = Table(title=title)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("contestant", "note") else "right")
    found = {row["contender"]: row for row in rows}
    for row in rows:
        over = found.get(row["over"], row)
        table.add_row(row["contender"], *_figures(row, over), *_traffic(row, over), *_losses(row, deterministic))
    return table


def _figures(row: Row, over: Row) -> list[str]:
    seconds, peak = row["seconds"], row["peak_bytes"]
    return [
        tables.seconds_text(seconds) if seconds else "",
        f"{over['seconds'] / seconds:.3f} x" if seconds and over["seconds"] else "",
        f"{row['tokens_per_second']:,.0f}" if seconds else "",
        f"{peak / 2**30:.4g} GiB" if peak else "",
    ]


def _traffic(row: Row, over: Row) -> list[str]:
    carried = [row["bytes"].get(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce")]
    gathered, *others = ["" if n is None else f"{n / 1e6:.5g} MB" for n in carried]
    ratio = gathered_ratio(row, over)
    return [gathered, "" if ratio is None else f"{ratio:.4f} x", *others]


def _losses(row: Row, deterministic: bool) -> list[str]:
    losses, notes = mean_losses(row), [row["reason"]] if "reason" in row else []
    equal, apart = row.get("losses_equal_without"), row.get("loss_difference")
    if equal:
        notes.append("losses bitwise those without the FP8 gather")
    elif equal is not None:
        notes.append("LOSSES DIFFER" if deterministic else "losses differ, as torch's own may (--losses)")
    if apart is not None:
        notes.append(f"within {float(apart):.2g} of one process at first")
    return [f"{losses[-1]:.6f}" if losses else "", "; ".join(notes)]


if __name__ == "__main__":
    app()
