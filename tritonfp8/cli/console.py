"""Shared by the commands: the console, errors, exit codes, and help texts of common options."""

from __future__ import annotations

from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

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


class Bars:
    """A progress bar with ETA for each stage of a command; without a terminal, one line a stage."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bars = Progress(
            *columns, TextColumn("ETA"), TimeRemainingColumn(), console=console, disable=not console.is_terminal
        )
        self.tasks: dict[str, Any] = {}

    def __enter__(self) -> Bars:
        self.bars.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` steps of a stage are finished."""
        if stage not in self.tasks:
            self.tasks[stage] = self.bars.add_task(stage, total=total)
        self.bars.update(self.tasks[stage], completed=done, total=total)
        if done == total and not self.console.is_terminal:
            self.console.print(f"{stage}: {done}/{total}")
