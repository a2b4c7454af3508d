"""Train with weights that are rounded to MXFP4 and in bf16, and compare what the rounded weights of both predict.

    python -m bench.training.rounded --out bench/results/nvidia-h200

Each run is a process that trains one model from one seed in both recipes, on the same batches. The weights that the
recipe rounds are then rounded in the bf16 model too, which goes on computing in bf16. All losses are of held-out text.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn

from bench.contest.machine import results_folder, write_results
from tritonfp8 import recipes
from tritonfp8.layers.linear.weight_source import rounded
from tritonfp8.layers.moe import ConvertedExperts
from tritonfp8.training import BASELINE, Settings, loop, prepare

RECIPE = "mxfp4_weights"


class AfterRounding(loop.RunObserver):
    """Measures the held-out loss of bf16's model after its weights are rounded as the recipe rounds them.

    Attributes:
        loss: in nats a byte; None without held-out text, or before bf16 was trained.
        rounded: how many weights were rounded.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.loss: float | None = None
        self.rounded = 0

    def trained(self, job: Any, run: loop.Run, model: nn.Module) -> None:
        """Note what the recipe converts, or round bf16's model."""
        if run.recipe == RECIPE:
            self.names = list(run.converted)
            return
        with torch.no_grad():
            for name in self.names:
                module = model.get_submodule(name)
                weights = module.weights() if isinstance(module, ConvertedExperts) else {"weight": module.weight}
                for weight in weights.values():
                    weight.copy_(rounded(weight, recipes.get(RECIPE).weights))
                    self.rounded += weight.numel()
        self.loss = loop.held_out_loss(job, model)


def train(options: dict[str, Any], device: str | None) -> dict[str, Any]:
    """Both recipes from one seed.

    Raises:
        RuntimeError: a recipe failed, or nothing was rounded.
    """
    after = AfterRounding()
    # The recipe comes first: bf16's weights are rounded where it converts.
    result = loop.run(prepare(Settings.resolve(recipes=(RECIPE, BASELINE), device=device, **options)), after)
    if failed := [f"{run.recipe}: {run.failure}" for run in result.runs if run.failure]:
        raise RuntimeError("; ".join(failed))
    if not after.rounded or after.loss is None:
        raise RuntimeError(f"{after.rounded} weights were rounded, and the loss after it is {after.loss}")
    losses = {run.recipe: run.held_out_loss for run in result.runs}
    return {
        **{name: options[name] for name in ("model", "seed")},
        "rounded_weights": after.rounded,
        RECIPE: losses[RECIPE],
        BASELINE: losses[BASELINE],
        "bf16_rounded": after.loss,
    }


def in_process(options: dict[str, Any], gpu: int) -> dict[str, Any]:
    """:func:`train` in a process of its own, on one GPU.

    Raises:
        RuntimeError: it failed; has the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        command = [sys.executable, "-m", "bench.training.rounded", "--one", json.dumps(options), "--out", str(path)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{options}: exit status {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def main(
    models: Annotated[str, typer.Option(help="As for `tritonfp8 train`, separated by commas.")] = "160m,160m-moe",
    seeds: Annotated[str, typer.Option(help="Numbers, separated by commas.")] = "0,1,2",
    steps: Annotated[int, typer.Option(help="Steps of a run.")] = 500,
    batch_size: Annotated[int, typer.Option(help="Sequences a step.")] = 8,
    seq_len: Annotated[int, typer.Option(help="Bytes of text a sequence.")] = 1024,
    at_once: Annotated[int, typer.Option(help="Runs at a time, spread over the GPUs.")] = 1,
    one: Annotated[str, typer.Option(hidden=True)] = "",
    out: Annotated[Path | None, typer.Option(help="Folder for rounded.json.")] = None,
) -> None:
    """Train, compare, and write; fails if a rounded bf16 model has a lower loss than the recipe's."""
    if one:
        assert out is not None
        out.write_text(json.dumps(train(json.loads(one), None)))
        return
    sizes = {"steps": steps, "batch_size": batch_size, "seq_len": seq_len}
    wanted = [{"model": m, "seed": int(s), **sizes} for m, s in itertools.product(models.split(","), seeds.split(","))]
    gpus = max(1, torch.cuda.device_count())
    with ThreadPoolExecutor(at_once) as pool:
        rows = list(pool.map(in_process, wanted, [index % gpus for index in range(len(wanted))]))
    write_results((out or results_folder()) / "rounded.json", {"sizes": sizes, "rows": rows})
    columns = ("model", "seed", BASELINE, "bf16_rounded", RECIPE)
    table = Table(*columns)
    for row in rows:
        table.add_row(*(f"{row[name]:.4f}" if isinstance(row[name], float) else str(row[name]) for name in columns))
    Console(width=80).print(table)
    sys.exit(any(row[RECIPE] >= row["bf16_rounded"] for row in rows))


if __name__ == "__main__":
    typer.run(main)
