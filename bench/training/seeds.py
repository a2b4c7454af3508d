"""Train from several seeds in several recipes, and compare the losses with bf16's of the same seed.

    python -m bench.training.seeds --out bench/results/nvidia-h200/seeds-160m

Each run is a process of ``tritonfp8 train``. The data is written after each run. The same command again goes on with
the rest.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.contest.machine import results_folder, write_results
from tritonfp8.training import BASELINE, report

# The loss of a step is the loss of its batch. The mean over so many compares recipes, which see the same batches.
MEAN_STEPS = 300
LIMIT = 0.005


@dataclass
class Run:
    """What one recipe gave from one seed.

    Attributes:
        recipe: the recipe.
        seed: seed of the weights and of the choice of text.
        text: SHA-256 of the text.
        held_out_loss: loss after the last step on text that was not trained on, in nats a byte; None if not measured.
        losses: mean cross-entropy of each step's batch, in nats a byte.
    """

    recipe: str
    seed: int
    text: str
    held_out_loss: float | None
    losses: list[float]

    @property
    def last_loss(self) -> float:
        """Mean loss of the last :data:`MEAN_STEPS` steps."""
        return statistics.fmean(self.losses[-MEAN_STEPS:])


def train(recipe: str, seed: int, options: dict[str, Any]) -> Run:
    """Train one recipe from one seed in a process.

    Raises:
        RuntimeError: the process failed, or not all steps ran; has the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        chosen = {**options, "recipes": recipe, "seed": seed, "out": folder}
        arguments = itertools.chain.from_iterable((f"--{name.replace('_', '-')}", str(v)) for name, v in chosen.items())
        done = subprocess.run(
            [sys.executable, "-m", "tritonfp8", "train", *arguments], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(
                f"{recipe}, seed {seed}: exit status {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}"
            )
        return read(Path(folder) / report.JSON_NAME, recipe)


def read(path: Path, recipe: str) -> Run:
    """The run of ``recipe`` in a JSON file of ``tritonfp8 train``.

    Raises:
        RuntimeError: it has not all steps.
    """
    found = json.loads(path.read_text())
    (run,) = (each for each in found["runs"] if each["recipe"] == recipe)
    if len(run["losses"]) != found["settings"]["steps"]:
        raise RuntimeError(f"{path}: {recipe} ended after {len(run['losses'])} of {found['settings']['steps']} steps")
    losses = [round(loss, 5) for loss in run["losses"]]
    return Run(name_of(recipe), found["settings"]["seed"], found["text"]["sha256"], run.get("held_out_loss"), losses)


def name_of(recipe: str) -> str:
    """The name of a recipe that is given by name or as a TOML file."""
    return Path(recipe).stem


def judge(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """Relative difference of each run from bf16 of its seed: of the last steps' mean loss, and of the held-out loss.

    Raises:
        ValueError: the two were trained on different text.
    """
    runs = list(runs)
    bases = {run.seed: run for run in runs if run.recipe == BASELINE}
    found = []
    for run in sorted(runs, key=lambda run: (run.recipe, run.seed)):
        base = bases.get(run.seed)
        if run.recipe == BASELINE or base is None:
            continue
        if run.text != base.text:
            raise ValueError(f"{run.recipe} and {BASELINE} of seed {run.seed} were trained on different text")
        held_out = run.held_out_loss / base.held_out_loss - 1 if run.held_out_loss and base.held_out_loss else None
        difference = run.last_loss / base.last_loss - 1
        found.append({"recipe": run.recipe, "seed": run.seed, "difference": difference, "held_out": held_out})
    return found


def plot(runs: list[Run], path: Path) -> None:
    """Each recipe's difference from bf16 by step, one line a seed."""
    import torch
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    bases = {run.seed: torch.tensor(run.losses) for run in runs if run.recipe == BASELINE}
    others = sorted({run.recipe for run in runs} - {BASELINE})
    for run in runs:
        if run.recipe != BASELINE and run.seed in bases:
            width = min(MEAN_STEPS, len(run.losses))
            means = [losses.unfold(0, width, 1).mean(1) for losses in (torch.tensor(run.losses), bases[run.seed])]
            color, style = f"C{1 + others.index(run.recipe)}", ("-", "--", ":", "-.")[run.seed % 4]
            steps = range(width, width + len(means[0]))
            axes.plot(
                steps, 100 * (means[0] / means[1] - 1), style, color=color, label=f"{run.recipe}, seed {run.seed}"
            )
    axes.axhline(0, color="grey", linewidth=0.6)
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss over bf16's, mean of {MEAN_STEPS} steps, %")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def collect(
    runs: list[Run],
    wanted: list[tuple[str, int]],
    options: dict[str, Any],
    path: Path,
    data: Path | None = None,
    at_once: int = 1,
) -> list[str]:
    """Train what is missing of ``wanted`` into ``runs``, writing ``path`` after each; returns what failed."""
    arguments = options if data is None else options | {"data": data}
    have = {(run.recipe, run.seed) for run in runs}
    missing = [each for each in wanted if (name_of(each[0]), each[1]) not in have]
    failed = []
    with ThreadPoolExecutor(at_once) as pool:
        for done in as_completed([pool.submit(train, *each, arguments) for each in missing]):
            try:
                runs.append(done.result())
            except RuntimeError as error:
                failed.append(str(error))
                continue
            rows = sorted(map(asdict, runs), key=lambda row: (row["recipe"], row["seed"]))
            write_results(path, {"options": options, "mean_steps": MEAN_STEPS, "found": judge(runs), "rows": rows})
    return failed


def resume(path: Path, options: dict[str, Any]) -> list[Run]:
    """The runs of an earlier call. Exits with a message if they had other options."""
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    if found["options"] != options:
        sys.exit(f"{path} has runs with {found['options']}, and not {options}; give another folder with --out")
    return [Run(**row) for row in found["rows"]]


def main(
    model: Annotated[str, typer.Option(help="As for `tritonfp8 train`.")] = "160m",
    recipes: Annotated[str, typer.Option(help="Names or TOML files, separated by commas.")] = "bf16,rowwise,blockwise",
    seeds: Annotated[str, typer.Option(help="Numbers, separated by commas.")] = "0,1,2",
    steps: Annotated[int, typer.Option(help="Steps of a run.")] = 3000,
    batch_size: Annotated[int, typer.Option(help="Sequences a step.")] = 8,
    seq_len: Annotated[int, typer.Option(help="Bytes of text a sequence.")] = 1024,
    data: Annotated[Path | None, typer.Option(help="As for `tritonfp8 train`.")] = None,
    at_once: Annotated[int, typer.Option(help="Runs that share the GPU at a time.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder for seeds.json and seeds.png.")] = None,
) -> None:
    """Train each recipe from each seed, and compare with bf16 of the same seed."""
    options = {"model": model, "steps": steps, "batch_size": batch_size, "seq_len": seq_len}
    # Where the text lies differs from machine to machine. Each run has the SHA-256 of its text.
    options |= {} if data is None else {"data": data.name}
    out = out or results_folder() / f"seeds-{model}"
    runs = resume(out / "seeds.json", options)
    wanted = [(recipe, int(seed)) for seed in seeds.split(",") for recipe in recipes.split(",")]
    failed = collect(runs, wanted, options, out / "seeds.json", data, at_once)
    found = judge(runs)
    for row in found:
        held_out = "not measured" if row["held_out"] is None else f"{row['held_out']:+.2%}"
        print(f"{row['recipe']}, seed {row['seed']}: loss {row['difference']:+.2%}, held-out loss {held_out}")
    if runs:
        plot(runs, out / "seeds.png")
    print(*failed, sep="\n")
    beyond = [row for row in found if abs(row["difference"]) > LIMIT or abs(row["held_out"] or 0) > LIMIT]
    print(f"{len(beyond)} of {len(found)} are more than {LIMIT:.1%} from bf16")
    sys.exit(bool(failed or beyond))


if __name__ == "__main__":
    typer.run(main)
