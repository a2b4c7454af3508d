"""``tritonfp8 advise``: whether FP8 makes a model faster, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from tritonfp8 import advice
from tritonfp8.cli.console import INTERRUPTED, MODEL_HELP, Bars, console_of, fail, names_in
from tritonfp8.training import require_train_extra
from tritonfp8.warmup.record import DTYPES

_SHAPES = 'JSON file of linear layers: a list of {"m": tokens, "n": out features, "k": in features}.'
_FILE = "model.py:function: returns a model, and its inputs as a mapping of keywords or a tuple."
_TOKENS = "Sequences x tokens a sequence; for a model of images the images of a batch."
_DTYPE = f"Dtype of the weights: {', '.join(DTYPES)}. float32 runs under bfloat16 autocast."
_MACHINE = "Predict for this machine, h200 or h100, and measure nothing. [default without a GPU: h200]"
_OUT = "Folder for advice.json, blocks.png and recipes.toml. [default: none is written]"


def advise(
    model: Annotated[str | None, typer.Option(help=MODEL_HELP)] = None,
    shapes: Annotated[Path | None, typer.Option(help=_SHAPES)] = None,
    file: Annotated[str | None, typer.Option(help=_FILE)] = None,
    tokens: Annotated[str, typer.Option(help=_TOKENS)] = "4x4096",
    recipes: Annotated[str, typer.Option(help="Recipes, or files of recipes, separated by commas.")] = ",".join(
        advice.DEFAULT_RECIPES
    ),
    compile: Annotated[
        str, typer.Option(help=f"What to measure, separated by commas: {', '.join(advice.MODES)}.")
    ] = ",".join(advice.DEFAULT_MODES),
    dtype: Annotated[str, typer.Option(help=_DTYPE)] = "bfloat16",
    machine: Annotated[str | None, typer.Option(help=_MACHINE)] = None,
    check: Annotated[bool, typer.Option("--check", help="Also measure the whole model, if it fits.")] = False,
    out: Annotated[Path | None, typer.Option(help=_OUT)] = None,
) -> None:
    """Measure a model in bf16 and in recipes, by layer, block and step, and recommend how to train it.

    One block of each kind of the model runs, with random weights. Without a GPU the times are predicted, and the
    report says so. Ctrl-C ends the measurement and keeps what was finished. A step is forward and backward.
    """
    console = console_of()
    try:
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
        on = torch.device("cuda") if machine is None and torch.cuda.is_available() else None
        source = _source(model, shapes, file, tokens, DTYPES[dtype], on)
        with Bars(console) as bars:
            found = advice.advise(
                source.model,
                *source.args,
                recipes=names_in(recipes),
                compile=names_in(compile),
                autocast=torch.bfloat16 if dtype == "float32" else None,
                machine=machine,
                check=check,
                progress=bars,
                prepare=source.prepare,
                **source.kwargs,
            )
    except (ValueError, ModuleNotFoundError) as error:
        fail(error)
    # A console would break the lines of a wide table.
    typer.echo(str(found))
    if out is not None:
        _write(found, out)
    if found.interrupted:
        raise typer.Exit(INTERRUPTED)


def _source(
    model: str | None, shapes: Path | None, file: str | None, tokens: str, dtype: torch.dtype, on: torch.device | None
) -> advice.Source:
    if sum(each is not None for each in (model, shapes, file)) != 1:
        raise ValueError("give one of --model, --shapes and --file")
    if model is not None:
        require_train_extra()
        return advice.from_config(model, tokens, dtype, on)
    if shapes is not None:
        return advice.from_shapes(shapes, dtype, on)
    assert file is not None
    return advice.from_file(file, tokens, dtype, on)


def _write(found: advice.Advice, folder: Path) -> None:
    """Write the files, and name them."""
    folder.mkdir(parents=True, exist_ok=True)
    found.save(folder / "advice.json")
    written = ["advice.json"]
    if found.blocks:
        advice.plot(found, folder / "blocks.png")
        written.append("blocks.png")
    if found.recommendation is not None and found.recommendation.layers is not None:
        found.recommendation.save(folder / "recipes.toml")
        written.append("recipes.toml")
    typer.echo(f"written to {folder}: {', '.join(written)}")
