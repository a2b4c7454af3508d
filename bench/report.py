"""Run the suites and write data, tables and plots: ``python -m bench.report [--only SUITE] [--quick] [--budget S]``.

Each suite runs in its own pytest process. When it ends, complete or not, its rows are written to ``<suite>.json``.
``tables.md``, ``bars.md`` and the plots depend on these files only; ``--render FOLDER`` makes them again.
"""

import contextlib
import importlib.util
import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import shapes, tables
from bench.contest.bars import BARS
from bench.contest.judge import judge
from bench.contest.machine import chosen_sets, results_folder, write_results

# Share of the budget for each suite, about its usual time. Later suites get the time that a suite leaves.
SUITES = {"scaled_matmul": 4, "quantize": 2, "linear": 4, "model": 5, "launch": 5, "grouped": 4, "experts": 4}
# Time for a test that started just before the budget ended.
GRACE_SECONDS = 120
STOP_SECONDS = 10
SMOKE_FOLDER = Path("runs") / "bench-smoke"
# By pytest's exit code: 5 if no tests were selected, 6 if the budget ended (bench/conftest.py).
OUTCOMES = {0: "complete", 5: "complete", 6: "cut off"}
_SHAPES_HELP = f"Sets: {', '.join(shapes.set_names())}, or {shapes.ALL}. [default: the sets of the bars]"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Row = dict[str, Any]


def read_rows(folder: Path) -> dict[str, list[Row]]:
    """The rows of each suite with data in ``folder``. A run that was cut off has the rows that it had written."""
    rows = {}
    for suite in SUITES:
        cut_off, path = rows_path(folder, suite), folder / f"{suite}.json"
        if cut_off.exists():
            rows[suite] = _lines(cut_off)
        elif path.exists():
            rows[suite] = json.loads(path.read_text())["rows"]
    return rows


def rows_path(folder: Path, suite: str) -> Path:
    """The file that a suite appends its rows to while it runs."""
    return folder / f"{suite}.jsonl"


def render(folder: Path) -> list[Path]:
    """Write tables and plots of the data in ``folder``; returns the files.

    Raises:
        ValueError: there is no data.
    """
    by_suite = read_rows(folder)
    if not by_suite:
        raise ValueError(f"{folder} holds no data of a suite ({', '.join(f'{suite}.json' for suite in SUITES)})")
    rows = list(itertools.chain.from_iterable(by_suite.values()))
    parts = ["# Ratios by case and set\n", tables.means_table(rows)]
    for suite, found in by_suite.items():
        parts += [f"# {suite}\n", tables.rows_table(found)]
    written = {"tables.md": "\n".join(parts), "bars.md": tables.bars_table(judge(rows, BARS))}
    for name, text in written.items():
        (folder / name).write_text(text)
    return [*(folder / name for name in written), *_plot(rows, folder)]


def _plot(rows: list[Row], folder: Path) -> list[Path]:
    if importlib.util.find_spec("matplotlib") is None:
        print('no plots: matplotlib is missing (pip install "tritonfp8[bench]"); --render makes them later')
        return []
    from bench.plots import PLOTS

    paths = []
    for name, plot in PLOTS.items():
        if (figure := plot(rows)) is not None:
            figure.savefig(folder / name, dpi=120)
            paths.append(folder / name)
    return paths


def run_suite(suite: str, options: Iterable[str], seconds: float | None, rows: Path) -> str:
    """Run a suite, and append its rows to the file ``rows``.

    Returns:
        The outcome: ``complete``, ``cut off`` (``seconds`` ended before all tests ran), ``failed``, ``stopped`` (a test
        ran on long after ``seconds``) or ``interrupted``.
    """
    command = [sys.executable, "-m", "pytest", f"bench/suites/test_{suite}.py", "-q", "--rows", str(rows), *options]
    if seconds is not None:
        command += ["--budget", f"{seconds:.0f}"]
    process = subprocess.Popen(command)
    try:
        code = process.wait(None if seconds is None else seconds + GRACE_SECONDS)
        outcome = OUTCOMES.get(code, "failed")
    except subprocess.TimeoutExpired:
        outcome = "stopped"
    except KeyboardInterrupt:
        outcome = "interrupted"
    _stop(process)
    return outcome


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the process if it still runs."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _lines(path: Path) -> list[Row]:
    rows = []
    for line in path.read_text().splitlines():
        # A killed process may have written only part of its last line.
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def measure(suites: Iterable[str], options: list[str], budget: float | None, folder: Path) -> dict[str, str]:
    """Run the suites in sequence and write their data; returns the outcome of each suite that ran."""
    end = None if budget is None else time.monotonic() + budget
    left = list(suites)
    outcomes: dict[str, str] = {}
    folder.mkdir(parents=True, exist_ok=True)
    while left and "interrupted" not in outcomes.values():
        share = None
        if end is not None:
            share = max(0.0, end - time.monotonic()) * SUITES[left[0]] / sum(SUITES[suite] for suite in left)
        suite = left.pop(0)
        path = rows_path(folder, suite)
        path.unlink(missing_ok=True)
        outcomes[suite] = run_suite(suite, options, share, path)
        if path.exists():
            write_results(folder / f"{suite}.json", {"outcome": outcomes[suite], "rows": _lines(path)})
            path.unlink()
    return outcomes


@app.command(help=__doc__)
def main(
    only: Annotated[list[str], typer.Option(help=f"Suites: {', '.join(SUITES)}. [default: all]")] = [],  # noqa: B006
    sets: Annotated[list[str], typer.Option("--shapes", help=_SHAPES_HELP)] = [],  # noqa: B006
    quick: Annotated[bool, typer.Option(help="Fewer and shorter rounds.")] = False,
    runs: Annotated[int | None, typer.Option(help="Runs of an op that must give the same bits.", min=1)] = None,
    budget: Annotated[float | None, typer.Option(help="Seconds for all suites.", min=1)] = None,
    out: Annotated[Path | None, typer.Option(help="Folder. [default: bench/results/<gpu>]")] = None,
    show: Annotated[Path | None, typer.Option("--render", help="Show a folder's data; do not measure.")] = None,
) -> None:
    if unknown := sorted(set(only) - set(SUITES)):
        raise typer.BadParameter(f"no suite is named {', '.join(unknown)}; suites: {', '.join(SUITES)}")
    sets = chosen_sets(sets)
    try:
        shapes.check_sets(sets)
        if show is not None:
            return _show(show)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if importlib.util.find_spec("pytest_benchmark") is None:
        raise typer.BadParameter('the suites need pytest-benchmark: pip install "tritonfp8[bench]"')
    folder = out or (SMOKE_FOLDER if sets == [shapes.SMOKE] else results_folder())
    options = [*(f"--shapes={name}" for name in sets), *(["--quick"] if quick else [])]
    options += [] if runs is None else [f"--runs={runs}"]
    outcomes = measure(only or SUITES, options, budget, folder)
    if read_rows(folder):
        _show(folder)
    for suite, outcome in outcomes.items():
        print(f"{suite}: {outcome}")
    if set(outcomes.values()) != {"complete"}:
        raise typer.Exit(1)


def _show(folder: Path) -> None:
    for path in render(folder):
        print(f"written: {path}")
    print((folder / "bars.md").read_text())


if __name__ == "__main__":
    app()
