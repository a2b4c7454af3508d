"""The measurement of training with stored weights, at a small size on the CPU."""

import json

from typer.testing import CliRunner

from bench.training import stored


def test_losses(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "MEAN_STEPS", 2)
    options = ["--model", "tiny", "--steps", "4", "--batch-size", "1", "--seq-len", "16", "--device", "cpu"]
    done = CliRunner().invoke(stored.app, ["loss", "--out", str(tmp_path), "--moments", "fp8", *options])
    assert done.exit_code == 0, done.output
    data = json.loads((tmp_path / "stored-training-tiny-rowwise.json").read_text())
    master, stochastic, nearest = data["rows"]
    assert [row["contestant"] for row in data["rows"]] == list(stored.CONTESTANTS)
    assert len({row["losses"][-1] for row in data["rows"]}) == 3
    assert data["excess"] == stochastic["last"] / master["last"] - 1
    assert 12 <= master["bytes"]["linear"] < 12.01
    for row in (stochastic, nearest):
        assert 3 < row["bytes"]["linear"] < 3.3


def test_bytes_of_a_step():
    layer, optimizer = stored.stepped_layer((256, 512), "rowwise", "fp8", "cpu")
    moved = stored.moved_bytes(layer, optimizer)
    assert 256 * 512 * (4 + 2 * 3) < moved < 1.02 * 256 * 512 * (4 + 2 * 3)
