"""The examples run, word for word, and do what their pages say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(name, *arguments, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_transformers_trainer(tmp_path):
    shown = run("transformers_trainer.py", "--steps", "10", folder=tmp_path)
    found = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", shown)]
    assert len(found) == 5
    assert found[-1] < found[0]
    assert re.search(r"restored: 14 layers", shown)


@pytest.mark.parametrize(
    ("name", "steps", "text"),
    [
        ("lightning_trainer.py", 10, "14 converted, 1 skipped"),
        ("peft_lora.py", 8, "of the linear FLOPs run in FP8"),
        ("diffusion_transformer.py", 8, "44 of 44 trainable weights moved"),
        ("vision_transformer.py", 8, "40 of 40 trainable weights moved"),
    ],
)
def test_the_loss_falls(tmp_path, name, steps, text):
    shown = run(name, "--steps", str(steps), folder=tmp_path)
    losses = re.search(r"loss: ([\d.]+) at the first step, ([\d.]+) at the last", shown).groups()
    first, last = map(float, losses)
    assert last < first
    assert text in shown


def test_teach(tmp_path):
    """Its own assertions compare casts, products and the layer; a bf16 layer and its layer learn alike."""
    shown = run("teach.py", folder=tmp_path)
    assert shown.count("to the bit") == 3
    (first, last), (first_in_fp8, last_in_fp8) = re.findall(r"loss: ([\d.]+) at the first step, ([\d.]+)", shown)
    assert float(last) < 0.1 * float(first)
    assert float(last_in_fp8) < 0.1 * float(first_in_fp8)


def test_grpo_exact(tmp_path):
    """The importance ratio is 1 to the bit until the weights change."""
    shown = run("grpo_exact.py", "--steps", "6", folder=tmp_path)
    assert "update 1 of each batch: ratios 1.0 to 1.0" in shown
    low, high = re.search(r"update 2 of each batch: ratios (\S+) to (\S+)", shown).groups()
    assert float(low) < 0.99
    assert float(high) > 1.01
