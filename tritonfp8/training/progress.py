"""Progress of a training comparison on a console, and its results after each recipe."""

from __future__ import annotations

import time
from pathlib import Path

import rich.progress
from rich.console import Console

from tritonfp8.compat.machine import MISSING
from tritonfp8.training import report
from tritonfp8.training.loop import Result, RunObserver

_LINES_A_RECIPE = 10


class Progress(RunObserver):
    """Progress on a console: bars with loss, tokens/s and ETA; without a terminal, ten lines a recipe.

    A context manager; use it around :func:`tritonfp8.training.run`.

    Args:
        console: where to print.
        with_speed: whether to print tokens/s.
        folder: where to write the JSON file after each recipe, so that a killed run keeps the recipes before; None
            writes nothing.
    """

    def __init__(self, console: Console, with_speed: bool = True, folder: Path | None = None) -> None:
        self.console, self.with_speed, self.folder = console, with_speed, folder
        speed = [rich.progress.TextColumn("{task.fields[speed]} tokens/s")] if with_speed else []
        self.bars = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("loss {task.fields[loss]}"),
            *speed,
            rich.progress.TextColumn("ETA"),
            rich.progress.TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.recipe, self.steps, self.begin, self.lines = "", 0, 0.0, 0
        self.task: rich.progress.TaskID | None = None

    def __enter__(self) -> Progress:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def started(self, recipe: str, steps: int) -> None:
        """A recipe begins."""
        self.recipe, self.steps, self.begin, self.lines = recipe, steps, time.perf_counter(), 0
        self.task = self.bars.add_task(recipe, total=steps, loss=MISSING, speed=MISSING)

    def stepped(self, step: int, loss: float, tokens_per_second: float) -> None:
        """``step`` steps are done."""
        speed = f"{tokens_per_second:,.0f}"
        if self.console.is_terminal:
            assert self.task is not None
            self.bars.update(self.task, completed=step, loss=f"{loss:.4f}", speed=speed)
            return
        if step * _LINES_A_RECIPE // self.steps > self.lines or step == self.steps:
            self.lines = step * _LINES_A_RECIPE // self.steps
            eta = (time.perf_counter() - self.begin) / step * (self.steps - step)
            speed = f", {speed} tokens/s" if self.with_speed else ""
            self.console.print(
                f"{self.recipe}: step {step}/{self.steps}, loss {loss:.4f}{speed}, "
                f"ETA {int(eta) // 60}:{int(eta) % 60:02}"
            )

    def ended(self, result: Result) -> None:
        """A recipe has ended."""
        if self.folder is not None and any(run.losses for run in result.runs):
            report.write_json(result, self.folder)
        run = result.runs[-1]
        if run.failure:
            self.console.print(f"{run.recipe} failed: {run.failure}\n{run.details}", markup=False, style="red")
