"""``tritonfp8 verify``: what the layers of a model run on this machine."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.cli.console import MODEL_HELP, fail
from tritonfp8.training import build_model, existing_device, require_train_extra
from tritonfp8.workflow import VerificationError, VerificationReport
from tritonfp8.workflow import verify as verify_model

_BYTES = 256


def verify(
    model: Annotated[str, typer.Option(help=MODEL_HELP)] = "tiny",
    recipe: Annotated[str, typer.Option(help="A recipe; see 'tritonfp8 recipes'.")] = "rowwise",
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences.")] = 2,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens (bytes) a sequence.")] = 64,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N. [default: cuda if there is a GPU, else cpu]")
    ] = None,
    inference: Annotated[bool, typer.Option("--inference", help="Forward only, in eval mode.")] = False,
) -> None:
    """Convert a model, run it once, and show what each layer runs in each of its three GEMMs.

    The model has random float32 weights and runs under bfloat16 autocast, as in 'tritonfp8 train'. On a CPU the
    reference runs. Exit code 1 if a converted layer does not run in FP8.
    """
    try:
        require_train_extra()
        recipes.of_layers(recipe)
        on = existing_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        report = _verified(model, recipe, (batch_size, seq_len), on, backward=not inference)
    except (ValueError, ModuleNotFoundError) as error:
        fail(error)
    # A console would break the lines of a wide table.
    typer.echo(str(report))
    if not report.ok:
        raise typer.Exit(1)


def _verified(
    name: str, recipe: str, shape: tuple[int, int], device: torch.device, backward: bool
) -> VerificationReport:
    model = build_model(name, seq_len=shape[1], seed=0).to(device).train(backward)
    tritonfp8.convert(model, recipe)
    tokens = torch.randint(0, _BYTES, shape, generator=torch.Generator().manual_seed(0)).to(device)
    try:
        with torch.autocast(device.type, torch.bfloat16):
            return verify_model(model, input_ids=tokens, labels=tokens, backward=backward)
    except VerificationError as error:
        found: VerificationReport = error.report
        return found
