"""Predictions beside what was measured on an H200 for public models, and the program that measured it."""

import json
from pathlib import Path

import pytest
import torch

import tritonfp8
from bench.advice import run as program

MEASURED = Path(__file__).parents[2] / "bench" / "results" / "nvidia-h200" / "advice"
MIXTURES = {
    "olmoe-1b-7b": "torch's experts take more than twice as long in eager bf16 as their GEMMs, and filter='auto' "
    "leaves experts out, with the layers beside them",
}
MODELS = [
    pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=MIXTURES[name])) if name in MIXTURES else name
    for name in sorted(path.stem for path in MEASURED.glob("*.json"))
]


def gpu_seconds(rows):
    """By contender and mode, of all blocks."""
    found = {}
    for row in rows:
        if row["contender"] in ("bf16", "rowwise"):
            key = row["contender"], row["mode"]
            found[key] = found.get(key, 0.0) + row["count"] * row["timing"]["gpu_seconds"]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_predictions_are_near(name):
    source = program.source(name, torch.bfloat16, None)
    advice = tritonfp8.advise(source.model, *source.args, recipes=["rowwise"], **source.kwargs)
    predicted = gpu_seconds(advice.as_dict()["blocks"])
    rows = json.loads((MEASURED / f"{name}.json").read_text())["rows"]
    measured = gpu_seconds([row for row in rows if row["part"] == "blocks"])
    for mode in ("none", "block"):
        for contender in ("bf16", "rowwise"):
            assert predicted[contender, mode] == pytest.approx(measured[contender, mode], rel=0.4)
        ours, theirs = (of["bf16", mode] / of["rowwise", mode] for of in (predicted, measured))
        assert ours == pytest.approx(theirs, rel=0.2)


@pytest.mark.parametrize("name", MODELS)
def test_auto_takes_no_block_that_was_slower_eager_or_compiled(name):
    data = json.loads((MEASURED / f"{name}.json").read_text())
    seconds = {}
    for row in (row for row in data["rows"] if row["part"] == "blocks"):
        key = row["contender"], row["mode"]
        seconds[key] = seconds.get(key, 0.0) + row["count"] * row["timing"]["seconds"]
    speeds = [seconds["bf16", mode] / seconds["rowwise", mode] for mode in ("none", "block")]
    model = program.source(name, torch.bfloat16, None).model
    report = tritonfp8.convert(model, "rowwise", filter="auto", tokens=data["tokens"])
    in_blocks = [layer for layer in report.converted if any(part.isdigit() for part in layer.split("."))]
    assert bool(in_blocks) == (min(speeds) >= 0.98), speeds


def test_the_program_writes_data_and_a_line(tmp_path):
    advice = program.advise("smoke", ["rowwise"], tmp_path)
    data = json.loads((tmp_path / "smoke.json").read_text())
    assert {row["part"] for row in data["rows"]} == {"layers", "blocks", "steps"}
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".png", ".txt"}
    assert program.line("smoke", advice).startswith("smoke: stay in bf16")
