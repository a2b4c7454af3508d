"""Results of a training comparison: a table, a plot of the losses and a JSON file."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import rich.box
import torch
from rich.console import Console
from rich.table import Table

from tritonfp8.compat import machine
from tritonfp8.compat.machine import MISSING
from tritonfp8.training.loop import UNTIMED_STEPS, Result, Run
from tritonfp8.training.settings import BASELINE, Job

KIND_LABELS = {
    "fp8": "",
    "dequantized": " (dequantized to bf16)",
    "emulated": " (emulated in bf16)",
    "reference": " (reference)",
}
JSON_NAME, PLOT_NAME, TABLE_NAME = "training.json", "loss.png", "table.md"
NO_SPEED_ON_A_CPU = (
    "no speeds: a CPU has no FP8 tensor cores, so FP8 recipes run the reference in plain torch, and the speed of bf16 "
    "depends on the CPU. Compare speeds on a GPU"
)


@dataclass(frozen=True)
class Summary:
    """The figures of one recipe; None if a figure is not available.

    Attributes:
        recipe: name of the recipe.
        steps: number of finished steps.
        final_loss: mean loss of the last steps, nats a byte; NaN or infinite if any loss of the run is.
        first_non_finite: number of the first step with a loss that is NaN or infinite.
        difference: relative difference of the final loss from bf16's, over the same steps.
        held_out_loss: mean loss on held-out text after the last step, nats a byte.
        held_out_difference: relative difference of the held-out loss from bf16's.
        tokens_per_second: from the median step time, without the first steps.
        speed_up: tokens/s divided by bf16's; None on a CPU (:data:`NO_SPEED_ON_A_CPU`).
        peak_bytes: peak of allocated GPU memory.
        shares: share of the FLOPs of all linear layers, by kind of GEMM (:data:`tritonfp8.compat.counting.KINDS`).
    """

    recipe: str
    steps: int
    final_loss: float | None
    first_non_finite: int | None
    difference: float | None
    held_out_loss: float | None
    held_out_difference: float | None
    tokens_per_second: float | None
    speed_up: float | None
    peak_bytes: int | None
    shares: dict[str, float]


def final_steps(job: Job) -> int:
    """Number of steps at the end whose mean is the final loss: a tenth of the steps, at most 50."""
    return max(1, min(50, job.settings.steps // 10))


def compares_speed(result: Result) -> bool:
    """Whether the speeds of recipes can be compared: not on a CPU, which has no FP8 tensor cores."""
    return torch.device(result.job.settings.device).type != "cpu"


def summarize(result: Result, run: Run) -> Summary:
    """The figures of ``run``, one of ``result.runs``."""
    settings, baseline = result.job.settings, result.run_of(BASELINE)
    first, last = max(0, len(run.losses) - final_steps(result.job)), len(run.losses)
    loss = _mean_loss(run, first, last)
    base_loss = _mean_loss(baseline, first, last) if baseline is not None else None
    seconds, base_seconds = run.median_step_seconds, baseline.median_step_seconds if baseline else None
    all_flops = (result.linear_flops or 0) * len(run.losses)
    return Summary(
        recipe=run.recipe,
        steps=last,
        final_loss=loss,
        first_non_finite=run.first_non_finite,
        difference=_relative(loss, base_loss),
        held_out_loss=run.held_out_loss,
        held_out_difference=_relative(run.held_out_loss, baseline.held_out_loss if baseline else None),
        tokens_per_second=settings.batch_size * settings.seq_len / seconds if seconds else None,
        speed_up=base_seconds / seconds if seconds and base_seconds and compares_speed(result) else None,
        peak_bytes=run.peak_bytes,
        shares={kind: flops / all_flops for kind, flops in run.flops.items()} if all_flops else {},
    )


def _relative(loss: float | None, base: float | None) -> float | None:
    return loss / base - 1 if loss is not None and base else None


def _mean_loss(run: Run, first: int, last: int) -> float | None:
    """Mean loss of steps ``first`` to ``last``, None if not run; NaN or infinite if any loss up to ``last`` is."""
    if first == last or len(run.losses) < last:
        return None
    bad = [loss for loss in run.losses[:last] if not math.isfinite(loss)]
    return bad[0] if bad else statistics.fmean(run.losses[first:last])


def table(result: Result) -> tuple[list[str], list[list[str]], list[str]]:
    """Header, rows and notes of the comparison, as text. Columns that compare with bf16 are there only if bf16 ran."""
    compared = result.run_of(BASELINE) is not None
    header = ["recipe", "final loss", "vs bf16", "held-out loss", "vs bf16", "tokens/s", "speed-up", "peak memory"]
    header.append("linear FLOPs in FP8")
    left_out = set() if compared else {"vs bf16", "speed-up"}
    left_out |= set() if compares_speed(result) else {"tokens/s", "speed-up"}
    keep = [name not in left_out for name in header]
    rows = [list(itertools.compress(_cells(result, run), keep)) for run in result.runs]
    return list(itertools.compress(header, keep)), rows, _notes(result)


def _cells(result: Result, run: Run) -> list[str]:
    summary, asked = summarize(result, run), result.job.settings.steps
    name = run.recipe if summary.steps == asked else f"{run.recipe} ({summary.steps} of {asked} steps)"
    loss = MISSING if summary.final_loss is None else f"{summary.final_loss:.4f}"
    if summary.first_non_finite is not None:
        value = run.losses[summary.first_non_finite - 1]
        loss = f"{'NaN' if math.isnan(value) else 'Inf'} at step {summary.first_non_finite}"
    return [
        name + (" FAILED" if run.failure else ""),
        loss,
        MISSING if run.recipe == BASELINE else _percent(summary.difference),
        _figure(summary.held_out_loss, "{:.4f}"),
        MISSING if run.recipe == BASELINE else _percent(summary.held_out_difference),
        _figure(summary.tokens_per_second, "{:,.0f}"),
        _figure(summary.speed_up, "{:.2f}x"),
        "n/a" if summary.peak_bytes is None else f"{summary.peak_bytes / 2**30:.2f} GiB",
        _share_text(summary) if summary.steps else MISSING,
    ]


def _figure(value: float | None, form: str) -> str:
    return MISSING if value is None or not math.isfinite(value) else form.format(value)


def _percent(share: float | None) -> str:
    return _figure(share, "{:+.2%}").replace("%", " %")


def _share_text(summary: Summary) -> str:
    parts = [
        f"{100 * summary.shares[kind]:.1f}".removesuffix(".0") + " %" + label
        for kind, label in KIND_LABELS.items()
        if summary.shares.get(kind)
    ]
    return " + ".join(parts) or "0 %"


def _notes(result: Result) -> list[str]:
    settings, last = result.job.settings, final_steps(result.job)
    steps = f"the last {last} steps" if last > 1 else "the last step"
    over = "; vs bf16: over the same steps of both" if result.run_of(BASELINE) else ""
    untimed = max((run.untimed_steps for run in result.runs), default=UNTIMED_STEPS)
    speed = f"tokens/s: from the median step, without the first {untimed} steps (compilation, warm-up)"
    notes = [
        f"final loss: nats a byte, mean of {steps}{over}",
        "held-out loss: nats a byte after the last step, on text that was not trained on",
        speed if compares_speed(result) else NO_SPEED_ON_A_CPU,
        "linear FLOPs in FP8: share in the FLOPs of all linear layers, counted from the GEMMs that ran",
    ]
    notes += [settings.notice] if settings.notice else []
    notes += [f"{run.recipe} failed: {run.failure}" for run in result.runs if run.failure]
    notes += ["Interrupted: the figures cover the finished steps."] if result.interrupted else []
    return notes


def show(result: Result, console: Console) -> None:
    """Print the comparison."""
    header, rows, notes = table(result)
    out = Table(title=title(result), title_justify="left", box=rich.box.SIMPLE_HEAD, pad_edge=False)
    *figures, last = header
    for name in figures:
        out.add_column(name, justify="left" if name == "recipe" else "right", overflow="fold")
    # Wide enough for its longest word, so that a narrow terminal does not break it.
    out.add_column(last, min_width=11)
    for row in rows:
        out.add_row(*row)
    console.print(out)
    for note in notes:
        console.print(note, markup=False, highlight=False)


def markdown(result: Result) -> str:
    """The comparison as a Markdown document."""
    header, rows, notes = table(result)
    lines = [header, ["---"] * len(header), *rows]
    body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"# {title(result)}\n\n{body}\n\n" + "\n".join(f"- {note}" for note in notes) + "\n"


def title(result: Result) -> str:
    """One line that names the model, the steps and the machine."""
    settings = result.job.settings
    parameters = sum(parameter.numel() for parameter in result.job.model.parameters())
    return (
        f"{settings.model} ({parameters / 1e6:.1f} M parameters), {settings.steps} steps of "
        f"{settings.batch_size} x {settings.seq_len} tokens{', compiled' if settings.compile else ''}, "
        f"{machine.machine(settings.device)['name']}"
    )


def to_json(result: Result) -> dict[str, Any]:
    """The whole comparison as plain data; losses that are not finite become the strings "nan", "inf" and "-inf"."""
    job = result.job
    text = {key: value for key, value in vars(job.text).items() if not isinstance(value, torch.Tensor)}
    text |= {"bytes": job.text.data.numel(), "held_out_bytes": job.text.held_out.numel()}
    parameters = sum(parameter.numel() for parameter in job.model.parameters())
    runs = []
    for run in result.runs:
        figures = {**asdict(run), **asdict(summarize(result, run)), "untimed_steps": run.untimed_steps}
        total = sum(run.flops.values())
        figures["shares_of_converted"] = {kind: flops / total for kind, flops in run.flops.items()}
        runs.append(figures)
    data = {
        "command": ["tritonfp8", *sys.argv[1:]],
        "settings": asdict(job.settings),
        "model": {"parameters": parameters, "linear_flops_a_step": result.linear_flops},
        "text": text,
        "versions": machine.versions(),
        "machine": machine.machine(job.settings.device) | {"threads": result.threads},
        "final_steps": final_steps(job),
        "interrupted": result.interrupted,
        "runs": runs,
    }
    plain: dict[str, Any] = _finite(data)
    return plain


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by their names."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def plot(result: Result, path: Path) -> None:
    """Plot losses by step to a PNG: raw and smoothed, and below (if bf16 ran) each recipe's difference from bf16."""
    from matplotlib.figure import Figure

    runs = [run for run in result.runs if run.losses]
    baseline, width = result.run_of(BASELINE), max(1, result.job.settings.steps // 20)
    others = [run for run in runs if run is not baseline] if baseline else []
    figure = Figure(figsize=(9, 7 if others else 5), dpi=150, layout="constrained")
    axes = figure.subplots(2 if others else 1, 1, sharex=True, squeeze=False, height_ratios=[2.2, 1] if others else [1])
    top, bottom = axes[0, 0], axes[-1, 0]
    for index, run in enumerate(runs):
        color = f"C{index}"
        top.plot(range(1, len(run.losses) + 1), run.losses, color=color, alpha=0.2, linewidth=0.8)
        smooth = _running_mean(run.losses, width)
        top.plot(
            range(width, width + len(smooth)),
            smooth,
            color=color,
            linewidth=2.6 if run is baseline else 1.5,
            label=run.recipe,
        )
        if baseline and run in others:
            base = _running_mean(baseline.losses, width)
            share = [100 * (ours / theirs - 1) for ours, theirs in zip(smooth, base, strict=False)]
            bottom.plot(range(width, width + len(share)), share, color=color, linewidth=1.4, label=run.recipe)
    top.set_ylabel("loss (nats a byte)")
    top.set_title(title(result), fontsize=10)
    top.legend(title=f"mean of {width} steps (thin: each step)" if width > 1 else None)
    if others:
        bottom.axhline(0, color="C0" if runs[0] is baseline else "gray", linewidth=1)
        bottom.set_ylabel("difference from bf16 (%)")
    bottom.set_xlabel("step")
    for axis in axes[:, 0]:
        axis.grid(alpha=0.3)
    figure.savefig(path)


def _running_mean(values: list[float], width: int) -> list[float]:
    return [statistics.fmean(values[end - width : end]) for end in range(width, len(values) + 1)]


def write_json(result: Result, folder: Path) -> Path:
    """Write or replace the JSON file in ``folder``, and return its path."""
    path, partial = folder / JSON_NAME, folder / f".{JSON_NAME}"
    partial.write_text(json.dumps(to_json(result), indent=1, allow_nan=False) + "\n")
    partial.replace(path)
    return path


def write(result: Result, folder: Path) -> list[Path]:
    """Write JSON, table and (if a step finished) plot into ``folder``; returns their paths."""
    written = [write_json(result, folder), folder / TABLE_NAME]
    written[1].write_text(markdown(result))
    if any(run.losses for run in result.runs):
        written.append(folder / PLOT_NAME)
        plot(result, written[-1])
    return written


def new_folder(given: Path | None, model: str) -> Path:
    """Make the folder for the results: ``given``, or a new one in ``runs/`` named by model and time.

    Raises:
        ValueError: ``given`` has a result already, is not a folder, or cannot be written.
    """
    path = given or Path("runs") / f"{Path(model).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    if given is None:
        path = next(each for each in _numbered(path) if not each.exists())
    if (path / JSON_NAME).exists():
        raise ValueError(f"{path} has the result of another run ({JSON_NAME}); give another folder with --out")
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".{JSON_NAME}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"results cannot be written to {path}: {error.strerror}") from error
    return path


def _numbered(path: Path) -> Any:
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
