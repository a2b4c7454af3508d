"""The ``tritonfp8`` command: ``train``, ``doctor``, ``recipes`` and ``warmup``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import tritonfp8
from tritonfp8 import doctor, recipes, training, training_report, warmup_ops, warmup_ranks, warmup_workers
from tritonfp8 import warmup as warming
from tritonfp8.training_models import MODELS

PLAIN_WIDTH = 160
INTERRUPTED = 130

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False
)


def main() -> None:
    """Run the command line."""
    app(prog_name="tritonfp8")


def _console(stderr: bool = False) -> Console:
    """A console that does not squeeze tables into 80 columns where nobody sees a terminal."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=PLAIN_WIDTH)


def _fail(error: Exception) -> NoReturn:
    _console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False)
    raise typer.Exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tritonfp8 {tritonfp8.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """FP8, block-scaled and MX training for PyTorch."""


def _by_device(name: str) -> str:
    return ", ".join(f"{getattr(defaults, name)} on {device}" for device, defaults in training.DEFAULTS.items())


_MODEL_HELP = f"{', '.join(MODELS)}, or the path of a transformers config (JSON file or folder)."
_RECIPES_HELP = (
    "Recipes to compare, separated by commas; see 'tritonfp8 recipes'. "
    "'bf16-perturbed' is bf16 from slightly other weights: the noise of the comparison."
)


@app.command()
def train(
    model: Annotated[str, typer.Option(help=_MODEL_HELP)] = "tiny",
    recipes: Annotated[str, typer.Option(help=_RECIPES_HELP)] = ",".join(training.DEFAULT_RECIPES),
    steps: Annotated[int | None, typer.Option(help=f"Steps a recipe. [default: {_by_device('steps')}]")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help=f"Sequences a step. [default: {_by_device('batch_size')}]")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help=f"Tokens (bytes) a sequence. [default: {_by_device('seq_len')}]")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate. [default: the model's]")] = None,
    compile: Annotated[
        bool | None, typer.Option("--compile/--no-compile", help="torch.compile. [default: on for cuda, off for cpu]")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N. [default: cuda with FP8 tensor cores, else cpu]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the choice of text.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for the results. [default: a new one in runs/]")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Text file or folder. [default: the text of Python's standard library]")
    ] = None,
) -> None:
    """Train one model on the same text in several recipes and compare losses, speed, memory and FP8 share.

    Every recipe starts from the same weights and sees the same batches: float32 weights, bfloat16 autocast, AdamW,
    warm-up over the first tenth of the steps, cosine decay, gradients clipped to norm 1. Ctrl-C ends the run and keeps
    what was measured. The defaults take about a minute on two CPU cores.
    """
    options = {"steps": steps, "batch_size": batch_size, "seq_len": seq_len, "lr": lr, "compile": compile}
    names = tuple(name.strip() for name in recipes.split(",") if name.strip())
    _compare(out, model=model, recipes=names, device=device, seed=seed, data=data, **options)


def _compare(out: Path | None, **options: Any) -> None:
    console = _console()
    try:
        settings = training.Settings.resolve(**options)
        if settings.notice:
            console.print(settings.notice, style="yellow", markup=False)
        job = training.prepare(settings)
        folder = training_report.new_folder(out, settings.model)
    except (ValueError, ModuleNotFoundError) as error:
        _fail(error)
    console.print(str(job.text), markup=False)
    with training_report.Progress(console) as progress:
        result = training.run(job, progress)
    if result.interrupted and not any(run.losses for run in result.runs):
        console.print("Interrupted before the first step: nothing was measured.")
        raise typer.Exit(INTERRUPTED)
    written = training_report.write(result, folder)
    training_report.show(result, console)
    console.print("written: " + ", ".join(map(str, written)), markup=False, highlight=False)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)
    if any(run.failure for run in result.runs):
        raise typer.Exit(1)


@app.command("doctor")
def examine() -> None:
    """Show the GPU, versions, abilities and how each recipe runs here; test every kernel. Exit code 1 if one fails."""
    if not doctor.diagnose(_console()):
        raise typer.Exit(1)


@app.command("recipes")
def list_recipes(
    name: Annotated[str | None, typer.Argument(help="Describe this recipe: its equations, specs and source.")] = None,
) -> None:
    """List the recipes, or describe one."""
    if name is not None:
        try:
            typer.echo(recipes.describe(name))
        except ValueError as error:
            _fail(error)
        return
    table = Table("recipe", *recipes.GEMMS, "FLOPs in 8 bits", show_lines=True)
    for each in map(recipes.get, recipes.names()):
        gemms = [getattr(each, gemm) for gemm in recipes.GEMMS]
        cells = [f"{gemm.lhs}\nx {gemm.rhs}" if gemm.quantized else "input's dtype" for gemm in gemms]
        table.add_row(each.name, *cells, f"{100 * each.quantized_share:.1f}".removesuffix(".0") + " %")
    _console().print(table)


_TOKENS = [f"{batch}x{length}" for batch, length in warming.DEFAULT_TOKENS]


@app.command()
def warmup(
    model: Annotated[str | None, typer.Option(help=_MODEL_HELP)] = None,
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
        typer.Option(help=f"Of the weights: {', '.join(warmup_ops.DTYPES)}. float32 runs under bfloat16 autocast."),
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
    first = (warmup_ranks.rank() or 0) == 0
    console = _console() if first else Console(quiet=True)
    if options["device"] == "cpu":
        console.print("--device cpu: the reference ops run, nothing is compiled here.", style="yellow")
    try:
        batches = [warming.parse_tokens(each) for each in tokens]
        with _Bars(console) as bars:
            report = warming.warm_up(tokens=batches, progress=bars, **options)
    except (ValueError, RuntimeError, ModuleNotFoundError) as error:
        _fail(error)
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
            _console(stderr=True).print(f"failed: {line}", style="red", markup=False, highlight=False)
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
