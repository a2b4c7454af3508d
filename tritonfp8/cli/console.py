"""Shared by the commands: the console, errors, exit codes, and help texts of common options."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console

from tritonfp8.training import MODELS

PLAIN_WIDTH = 160
INTERRUPTED = 130
MODEL_HELP = f"{', '.join(MODELS)}, or the path of a transformers config (JSON file or folder)."


def names_in(text: str) -> tuple[str, ...]:
    """Names separated by commas."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def console_of(stderr: bool = False) -> Console:
    """A console; without a terminal it is :data:`PLAIN_WIDTH` columns wide in place of 80, so that tables fit."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=PLAIN_WIDTH)


def fail(error: Exception) -> NoReturn:
    """Print an error that the user caused, and end with exit code 2."""
    console_of(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False)
    raise typer.Exit(2)
