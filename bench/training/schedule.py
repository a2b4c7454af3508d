"""Train bf16, then FP8, then bf16 under torch.compile, and resume in the middle.

    python -m bench.training.schedule --out bench/results/nvidia-h200/schedule-160m

Three runs see the same batches: ``bf16`` is the unconverted model. ``scheduled`` follows a RecipeSchedule and writes a
checkpoint in the middle of its FP8 stage. ``resumed`` is another model that loads the checkpoint and trains the rest.
The run counts the graphs that torch compiles in each step. Kernels are deterministic, so that losses can be compared
by their bits.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from bench.contest.machine import results_folder, write_results
from bench.distributed.compare import make_deterministic
from bench.models import digest
from tritonfp8 import RecipeSchedule
from tritonfp8.training import Settings, TrainingStep, prepare
from tritonfp8.training.corpus import batches
from tritonfp8.training.settings import Job

# Noise of single batches would hide a difference between the runs.
MEAN_STEPS = 50


@dataclass
class Run:
    """What one run did.

    Attributes:
        name: ``bf16``, ``scheduled`` or ``resumed``.
        first_step: its first step, counted from 0.
        losses: mean cross-entropy of each step's batch, in nats a byte.
        compiled: graphs that torch compiled in each step that compiled any, by step.
        digest: SHA-256 of the final weights.
    """

    name: str
    first_step: int = 0
    losses: list[float] = field(default_factory=list)
    compiled: dict[int, int] = field(default_factory=dict)
    digest: str = ""


def schedule_of(recipe: str, steps: int) -> RecipeSchedule:
    """The first and the last tenth in bf16, the rest in ``recipe``."""
    return RecipeSchedule([(0, "bf16"), ("10%", recipe), ("90%", "bf16")], total_steps=steps)


def graphs() -> int:
    """Number of graphs that torch has compiled in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def train(job: Job, run: Run, schedule: RecipeSchedule | None, checkpoint: Path | None = None) -> Run:
    """Train to the last step.

    Args:
        job: model, text and settings.
        run: receives the results; its first step says where to begin.
        schedule: recipes of the steps; None trains the unconverted model.
        checkpoint: read by a run that begins later than step 0, else written in the middle.
    """
    settings = job.settings
    model = copy.deepcopy(job.model).to(settings.device).train()
    if run.first_step:
        _scramble(model)
    if schedule is not None:
        schedule.convert(model)
    step = TrainingStep(model, settings)
    if run.first_step:
        state = torch.load(checkpoint, map_location=settings.device, weights_only=True)
        step.load_state_dict(state["step"])
        schedule.load_state_dict(state["schedule"])
    losses = []
    sizes = {name: getattr(settings, name) for name in ("steps", "batch_size", "seq_len", "seed")}
    for index, batch in enumerate(batches(job.text, **sizes)):
        if index < run.first_step:
            continue
        if schedule is not None:
            if checkpoint and not run.first_step and index == settings.steps // 2:
                torch.save({"step": step.state_dict(), "schedule": schedule.state_dict()}, checkpoint)
            schedule.step()
        before = graphs()
        losses.append(step(batch.to(settings.device).long()))
        if compiled := graphs() - before:
            run.compiled[index] = compiled
    run.losses = torch.stack(losses).tolist()
    run.digest = digest(model.state_dict())
    torch.compiler.reset()
    return run


def _scramble(model: nn.Module) -> None:
    """Other weights, so that a checkpoint that is not loaded in full shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)


def judge(runs: dict[str, Run], steps: int) -> dict[str, Any]:
    """The figures that the measurement is for."""
    pure, scheduled, resumed = (runs[name] for name in ("bf16", "scheduled", "resumed"))
    switches = [steps // 10, 9 * steps // 10]
    last = [sum(run.losses[-MEAN_STEPS:]) / len(run.losses[-MEAN_STEPS:]) for run in (pure, scheduled)]
    first_bf16 = pure.losses[: switches[0]] == scheduled.losses[: switches[0]]
    return {
        "switches": switches,
        "loss_of_bf16": last[0],
        "loss_of_schedule": last[1],
        "difference": last[1] / last[0] - 1,
        "first_stage_equal_to_the_bit": first_bf16,
        "graphs_after_second_switch": sum(n for step, n in scheduled.compiled.items() if step >= switches[1]),
        "resumed_equal_to_the_bit": resumed.losses == scheduled.losses[resumed.first_step :]
        and resumed.digest == scheduled.digest,
    }


def plot(runs: dict[str, Run], found: dict[str, Any], path: Path) -> None:
    """Losses of both runs, the difference, and the steps of the switches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2.2, 1])
    pure, scheduled = (torch.tensor(runs[name].losses) for name in ("bf16", "scheduled"))
    width = min(MEAN_STEPS, len(pure))
    means = [losses.unfold(0, width, 1).mean(1) for losses in (pure, scheduled)]
    steps = range(width, width + len(means[0]))
    for mean, label in zip(means, ("bf16", "bf16, rowwise, bf16"), strict=True):
        top.plot(steps, mean, label=label, linewidth=1.2)
    bottom.plot(steps, 100 * (means[1] / means[0] - 1), color="C1", linewidth=1.2)
    bottom.axhline(0, color="grey", linewidth=0.6)
    for axes in (top, bottom):
        for switch in found["switches"]:
            axes.axvline(switch, color="grey", linestyle="--", linewidth=0.8)
    top.set_ylabel(f"loss, mean of {width} steps (nats a byte)")
    top.legend()
    bottom.set_ylabel("difference, %")
    bottom.set_xlabel("step")
    figure.savefig(path, dpi=120)


def main(
    model: Annotated[str, typer.Option(help="As for `tritonfp8 train`.")] = "160m",
    recipe: Annotated[str, typer.Option(help="The recipe of the middle stage.")] = "rowwise",
    steps: Annotated[int, typer.Option(help="Steps of a run.")] = 1000,
    batch_size: Annotated[int | None, typer.Option(help="Sequences a step.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Bytes of text a sequence.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for schedule.json and schedule.png.")] = None,
) -> None:
    """Train a model in bf16, and in bf16, FP8 and bf16 by a schedule; resume the second; compare."""
    make_deterministic()
    settings = Settings.resolve(
        model=model, recipes=("bf16", recipe), steps=steps, batch_size=batch_size, seq_len=seq_len, compile=True
    )
    job = prepare(settings)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint.pt"
        runs = {
            "bf16": train(job, Run("bf16"), None),
            "scheduled": train(job, Run("scheduled"), schedule_of(recipe, steps), checkpoint),
            "resumed": train(job, Run("resumed", steps // 2), schedule_of(recipe, steps), checkpoint),
        }
    found = judge(runs, steps)
    for name, value in found.items():
        print(f"{name}: {value}")
    out = out or results_folder() / f"schedule-{model}"
    rows = [asdict(run) for run in runs.values()]
    write_results(out / "schedule.json", {"settings": asdict(settings), "found": found, "rows": rows})
    plot(runs, found, out / "schedule.png")
    ok = found["graphs_after_second_switch"] == 0 and found["resumed_equal_to_the_bit"]
    sys.exit(not (ok and abs(found["difference"]) <= 0.005))


if __name__ == "__main__":
    typer.run(main)
