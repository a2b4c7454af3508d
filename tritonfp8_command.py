"""The entry point of the ``tritonfp8`` command: help and version come without the package, as torch takes seconds."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

HELP = {
    "train": "Train one model on the same text in several recipes and compare losses, speed, memory and FP8 share.",
    "advise": "Measure a model in bf16 and in recipes, by layer, block and step, and recommend how to train it.",
    "doctor": "Show GPU, versions, abilities and how each recipe runs here; test every kernel. Exit code 1 if a test "
    "fails.",
    "recipes": "List the recipes, or describe one.",
    "verify": "Convert a model, run it once, and show what each layer runs in each of its three GEMMs.",
    "warmup": "Compile, and with --tune measure, all kernels of a model's training steps before training starts.",
}
"""The first paragraph of each command's docstring in tritonfp8/cli, in the order of the help."""


def _version(wanted: bool) -> None:
    if wanted:
        [found] = re.findall('__version__ = "(.*)"', (Path(__file__).parent / "tritonfp8" / "__init__.py").read_text())
        typer.echo(f"tritonfp8 {found}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """FP8, block-scaled and MX training for PyTorch."""


def root() -> typer.Typer:
    """The command without its commands."""
    app = typer.Typer(
        no_args_is_help=True, add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False
    )
    app.callback()(_root)
    return app


def main() -> None:
    """Run the command line."""
    if sys.argv[1:] in ([], ["--help"], ["--version"]):
        app = root()
        for name, text in HELP.items():
            app.command(name, help=text)(lambda: None)
    else:
        from tritonfp8.cli.app import app
    app(prog_name="tritonfp8")
