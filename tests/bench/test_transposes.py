"""The comparison of transposes from codes and from values."""

import json

import typer
from typer.testing import CliRunner

from bench.training import transposes


def row(recipe, source, seconds, peak=None):
    found = {"shape": "layers", "recipe": recipe, "from": source, "seconds": seconds}
    return found if peak is None else {**found, "peak_bytes": peak}


def test_figures_above_one_are_faster_and_below_one_smaller():
    rows = [row("rowwise", "values", 3.0, 100), row("rowwise", "codes", 2.0, 90), row("bf16", "", 4.0, 120)]
    (pair,) = transposes.compared(rows)
    assert pair["speed"] == 1.5
    assert pair["memory"] == 0.9
    assert (pair["over_bf16"], pair["memory_over_bf16"]) == (2.0, 0.75)


def test_rows_without_memory_or_bf16_have_no_such_figures():
    (pair,) = transposes.compared([row("rowwise", "values", 1.0), row("rowwise", "codes", 2.0)])
    assert pair == {"shape": "layers", "recipe": "rowwise", "speed": 0.5, "memory": None}


def test_the_program_measures_each_contender(tmp_path):
    app = typer.Typer()
    app.command()(transposes.main)
    done = CliRunner().invoke(app, ["--shapes", "tiny with biases", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "geometric mean of models" in done.output
    rows = json.loads((tmp_path / "transposes.json").read_text())["rows"]
    assert [(row["recipe"], row["from"]) for row in rows] == transposes.contenders("model")
    assert all(row["seconds"] > 0 and len(row["rounds"]) == transposes.ROUNDS for row in rows)
