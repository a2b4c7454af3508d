"""``tritonfp8 warmup``: compile and measure before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tritonfp8.cli.console import INTERRUPTED, MODEL_HELP, console_of, fail
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
        typer.Option(help="Sequences x tokens a sequence of the model's batches. May be given several times."),
    ] = _TOKENS,
    dtype: Annotated[
        str,
        typer.Option(help=f"Of the weights: {', '.join(record.DTYPES)}. float32 runs under bfloat16 autocast."),
    ] = "float32",
    tune: Annotated[
        bool, typer.Option("--tune/--no-tune", help="Measure the products' configurations and keep the fastest.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Measure again what these versions have measured.")] = False,
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
        float, typer.Option(min=1, help="Seconds that a rank of a launcher waits for the others.")
    ] = warming.DEFAULT_TIMEOUT,
) -> None:
    """Compile, and with --tune measure, all that training steps of a model launch, so that the first one need not.

    Goes on where a killed one stopped. Under torchrun one process a machine compiles, one of all measures. Ctrl-C ends
    it and keeps what is done. Exit code 1 if something failed.
    """
    options = {"model": model, "shapes": shapes, "dtype": dtype, "tune": tune, "force": force, "timeout": timeout}
    names = [name.strip() for name in recipes.split(",") if name.strip()]
    _warm_up(tokens, recipes=names, workers=workers, device=device, **options)


def _warm_up(tokens: list[str], **options: Any) -> None:
    first = (ranks.rank() or 0) == 0
    console = console_of() if first else Console(quiet=True)
    if options["device"] == "cpu":
        console.print("--device cpu: the reference ops run, nothing is compiled here.", style="yellow")
    try:
        batches = [warming.parse_tokens(each) for each in tokens]
        with _Bars(console) as bars:
            report = warming.warm_up(tokens=batches, progress=bars, **options)
    except (ValueError, RuntimeError, ModuleNotFoundError) as error:
        fail(error)
    _show_warm_up(report, console)


def _show_warm_up(report: warming.Report, console: Console) -> None:
    """Print what was done, and end with the exit code that says so."""
    if report.interrupted:
        console.print("Interrupted: what was done is kept; the same command goes on.")
    tuned = f", {report.tuned} products tuned, {report.skipped} tuned before" if report.tuned + report.skipped else ""
    console.print(f"{report.compiled} ops ready{tuned}, {len(report.failed)} failures, {report.seconds:.1f} s")
    for line in report.failed:
        # Every rank has the failures of all; the first says them.
        if not console.quiet:
            console_of(stderr=True).print(f"failed: {line}", style="red", markup=False, highlight=False)
    if report.interrupted:
        raise typer.Exit(INTERRUPTED)
    if report.failed:
        raise typer.Exit(1)


class _Bars:
    """A progress bar with ETA for each stage of a warm-up; a line a stage where nobody sees a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bars = Progress(*columns, TextColumn("ETA"), TimeRemainingColumn(), console=console)
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> _Bars:
        if self.console.is_terminal:
            self.bars.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self.console.is_terminal:
            self.bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` steps of a stage are done."""
        if stage not in self.tasks:
            self.tasks[stage] = self.bars.add_task(stage, total=total)
        self.bars.update(self.tasks[stage], completed=done, total=total)
        if done == total and not self.console.is_terminal:
            self.console.print(f"{stage}: {done}/{total}")
