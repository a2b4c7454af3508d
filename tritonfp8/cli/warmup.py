"""``tritonfp8 warmup``: compile and tune before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tritonfp8.cli.console import INTERRUPTED, MODEL_HELP, Bars, console_of, fail, names_in
from tritonfp8.warmup import ranks, record
from tritonfp8.warmup import run as warming
from tritonfp8.warmup import workers as warmup_workers

_TOKENS = [f"{batch}x{length}" for batch, length in warming.DEFAULT_TOKENS]


def warmup(
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    shapes: Annotated[
        Path | None,
        typer.Option(help='JSON file of linear layers: a list of {"m": tokens, "n": out features, "k": in features}.'),
    ] = None,
    recipes: Annotated[str, typer.Option(help="Recipes, separated by commas; see 'tritonfp8 recipes'.")] = ",".join(
        warming.DEFAULT_RECIPES
    ),
    tokens: Annotated[
        list[str],
        typer.Option(help="Batches of the model: sequences x tokens a sequence. May be given several times."),
    ] = _TOKENS,
    dtype: Annotated[
        str,
        typer.Option(help=f"Dtype of the weights: {', '.join(record.DTYPES)}. float32 runs under bfloat16 autocast."),
    ] = "float32",
    tune: Annotated[
        bool, typer.Option("--tune/--no-tune", help="Measure configurations of the GEMMs and save the fastest.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Measure again GEMMs that these versions have measured before.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, help=f"Processes that compile. [default: one a core, at most {warmup_workers.MAX_WORKERS}]"
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cuda or cuda:N; cpu goes through the steps and compiles nothing. [default: cuda]"),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1, help="Under a launcher: seconds that a rank waits for the others.")
    ] = warming.DEFAULT_TIMEOUT,
) -> None:
    """Compile, and with --tune measure, all kernels of a model's training steps before training starts.

    If it is killed, the same command continues. Under torchrun one process a machine compiles and rank 0 measures.
    Ctrl-C ends it and keeps finished work. Exit code 1 if something failed.
    """
    options = {"tune": tune, "force": force, "workers": workers, "device": device, "timeout": timeout}
    names = list(names_in(recipes))
    _warm_up(tokens, model=model, shapes=shapes, recipes=names, dtype=dtype, **options)


def _warm_up(tokens: list[str], **options: Any) -> None:
    first = (ranks.rank() or 0) == 0
    console = console_of() if first else Console(quiet=True)
    if options["device"] == "cpu":
        console.print("--device cpu: the reference ops run, and nothing is compiled.", style="yellow")
    try:
        batches = [warming.parse_tokens(each) for each in tokens]
        with Bars(console) as bars:
            report = warming.warm_up(tokens=batches, progress=bars, **options)
    except (ValueError, RuntimeError, ModuleNotFoundError) as error:
        fail(error)
    _show_warm_up(report, console)


def _show_warm_up(report: warming.Report, console: Console) -> None:
    """Print the report, and end with its exit code."""
    if report.interrupted:
        console.print("Interrupted: finished work is kept; the same command continues.")
    tuned = f", {report.tuned} GEMMs tuned, {report.skipped} tuned before" if report.tuned + report.skipped else ""
    console.print(f"{report.compiled} ops ready{tuned}, {len(report.failed)} failures, {report.seconds:.1f} s")
    for line in report.failed:
        # Every rank has the failures of all ranks; only rank 0 prints them.
        if not console.quiet:
            console_of(stderr=True).print(f"failed: {line}", style="red", markup=False, highlight=False)
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    if report.failed:
        raise typer.Exit(1)
