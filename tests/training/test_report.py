"""What a comparison shows: progress, speeds where they say something, and who ran the FLOPs."""

import dataclasses
import io

import torch
from rich.console import Console

from tritonfp8 import training
from tritonfp8.training import report as training_report


def test_on_a_gpu_speeds_are_compared():
    seconds = {"bf16": 0.5, "rowwise": 0.25}
    settings = training.Settings.resolve(device="cpu", recipes=("bf16", "rowwise"), steps=7, model="tiny")
    settings = dataclasses.replace(settings, device="cuda:0", batch_size=4, seq_len=128)
    job = training.settings.Job(settings, None, torch.nn.Linear(2, 2))
    runs = [training.loop.Run(name, step_seconds=[1.0] * 5 + [t] * 2, losses=[1.0] * 7) for name, t in seconds.items()]
    result = training.loop.Result(job, runs=runs)
    header, rows, notes = training_report.table(result)
    assert rows[0][header.index("tokens/s") :][:2] == ["1,024", "1.00x"]
    assert rows[1][header.index("tokens/s") :][:2] == ["2,048", "2.00x"]
    assert not any(training_report.NO_SPEED_ON_A_CPU in note for note in notes)


def test_terminal_gets_bars_with_loss_and_speed():
    console = Console(force_terminal=True, width=120, record=True, file=io.StringIO())
    with training.Progress(console) as progress:
        progress.started("rowwise", 10)
        progress.stepped(10, 2.5, 12345.0)
    shown = console.export_text()
    assert "rowwise" in shown
    assert "10/10 loss 2.5000 12,345 tokens/s ETA" in shown


def test_shares_name_what_ran_them():
    def text(**shares):
        figures = dict.fromkeys(training_report.Summary.__dataclass_fields__) | {"shares": shares}
        return training_report._share_text(training_report.Summary(**figures))

    assert text() == "0 %"
    assert text(fp8=1.0) == "100 %"
    assert text(fp8=2 / 3, high_precision=1 / 3) == "66.7 %"
    assert text(dequantized=1.0) == "100 % (dequantized to bf16)"
    assert text(emulated=1.0) == "100 % (emulated in bf16)"
    assert text(fp8=0.5, emulated=0.25, reference=0.25) == "50 % + 25 % (emulated in bf16) + 25 % (reference)"
