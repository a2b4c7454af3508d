"""The ``tritonfp8`` command: ``train``, ``doctor`` and ``recipes``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

import tritonfp8
from tritonfp8 import doctor, recipes, training, training_report
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
