"""``tritonfp8 train``: train one model on the same text in several recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tritonfp8 import training
from tritonfp8.cli.console import INTERRUPTED, MODEL_HELP, console_of, fail, names_in
from tritonfp8.training import report as training_report


def _by_device(name: str) -> str:
    return ", ".join(f"{getattr(defaults, name)} on {device}" for device, defaults in training.DEFAULTS.items())


_RECIPES_HELP = (
    "Recipes to compare, separated by commas; see 'tritonfp8 recipes'. "
    "'bf16-perturbed' is bf16 from slightly different weights: it shows the noise of the comparison."
)


def train(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "tiny",
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
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and of the choice of text.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for the results. [default: a new one in runs/]")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Text file or folder. [default: the text of Python's standard library]")
    ] = None,
) -> None:
    """Train one model on the same text in several recipes and compare losses, speed, memory and FP8 share.

    Every recipe starts from the same weights and sees the same batches: float32 weights, bfloat16 autocast, AdamW,
    warm-up over the first tenth of the steps, cosine decay, gradients clipped to norm 1. Ctrl-C ends the run and keeps
    the results so far. The defaults take one to three minutes on two CPU cores.
    """
    options = {"steps": steps, "batch_size": batch_size, "seq_len": seq_len, "lr": lr, "compile": compile}
    names = names_in(recipes)
    _compare(out, model=model, recipes=names, device=device, seed=seed, data=data, **options)


def _compare(out: Path | None, **options: Any) -> None:
    console = console_of()
    try:
        settings = training.Settings.resolve(**options)
        if settings.notice:
            console.print(settings.notice, style="yellow", markup=False)
        job = training.prepare(settings)
        folder = training_report.new_folder(out, settings.model)
    except (ValueError, ModuleNotFoundError) as error:
        fail(error)
    console.print(str(job.text), markup=False)
    with_speed = not settings.device.startswith("cpu")
    with training.Progress(console, with_speed, folder) as progress:
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
