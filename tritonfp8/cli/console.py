"""What the commands share: where they print, how they fail, and the help of options that several have."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console

from tritonfp8.training import MODELS

PLAIN_WIDTH = 160
INTERRUPTED = 130
MODEL_HELP = f"{', '.join(MODELS)}, or the path of a transformers config (JSON file or folder)."


def console_of(stderr: bool = False) -> Console:
    """A console that does not squeeze tables into 80 columns where nobody sees a terminal."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=PLAIN_WIDTH)


def fail(error: Exception) -> NoReturn:
    """Print an error of the caller's and end with exit code 2."""
    console_of(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False)
    raise typer.Exit(2)
