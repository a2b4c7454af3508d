"""Gradients reduced in float32, in bfloat16 and in 8 bits under FSDP2: losses of several seeds, bytes, and time.

    python -m bench.training.reductions --model tiny --steps 1000 --seeds 3

Each seed has its weights and its text, and each contestant of a seed the same. Without torchrun this command starts the
processes. On GPUs it then times a few steps again with ``NCCL_P2P_DISABLE=1``, as between GPUs without NVLink.
"""

import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from bench import tables
from bench.contest.machine import command_line, results_folder, write_results
from bench.distributed.bars import mean_losses
from bench.distributed.compare import Row, Settings, compare
from bench.distributed.models import BASELINE, REDUCTIONS, reduction_contestants
from bench.distributed.ranks import joined
from bench.training.seeds import LIMIT, MEAN_STEPS

FILE = "reductions.json"
CPU_FOLDER = Path("runs") / "bench-reductions"
CPU_PROCESSES = 2
# Of all steps so many are timed without NVLink.
TIMED_STEPS = 30
NO_NVLINK = {"NCCL_P2P_DISABLE": "1"}


def last_loss(row: Row) -> float:
    """The mean loss of all ranks over the last third of the steps, or fewer."""
    losses = mean_losses(row)
    return statistics.fmean(losses[-min(MEAN_STEPS, -(-len(losses) // 3)) :])


def summary(seeds: dict[int, list[Row]]) -> list[dict[str, Any]]:
    """Of each reduction: last losses by seed, their distance from float32's of the same seed, and the noise of seeds.

    The noise is the standard deviation of float32's last losses. ``within`` says whether the mean distance is at most
    the share of the loss that :mod:`bench.training.seeds` allows recipes.
    """
    found = []
    plain = [last_loss(rows[0]) for rows in seeds.values()]
    noise = statistics.stdev(plain) if len(plain) > 1 else None
    for index, name in enumerate(REDUCTIONS):
        rows = [each[index] for each in seeds.values()]
        losses = [last_loss(row) for row in rows]
        apart = [loss - base for loss, base in zip(losses, plain, strict=True)]
        sent = [row["bytes"].get("all_to_all", 0) + row["bytes"].get("reduce_scatter", 0) for row in rows]
        seconds = [row["seconds"] for row in rows if row["seconds"]]
        found.append(
            {
                "contender": name,
                "last_losses": losses,
                "over_float32": apart,
                "mean_over_float32": statistics.fmean(apart),
                "noise": noise,
                "within": abs(statistics.fmean(apart)) <= LIMIT * statistics.fmean(plain),
                "gradient_bytes": max(sent),
                "seconds": min(seconds) if seconds else None,
            }
        )
    return found


def show(rows: list[dict[str, Any]], title: str) -> None:
    """Print the table."""
    table = Table(title=title)
    for column in (
        "gradients",
        "step",
        "bytes",
        "last losses",
        "over float32",
        f"within {LIMIT:.1%}",
        "noise of seeds",
    ):
        table.add_column(column)
    base = rows[0]
    for row in rows:
        table.add_row(
            row["contender"],
            tables.seconds_text(row["seconds"]) if row["seconds"] else "",
            f"{row['gradient_bytes'] / base['gradient_bytes']:.3f} x",
            ", ".join(f"{x:.4f}" for x in row["last_losses"]),
            f"{row['mean_over_float32']:+.4f}",
            "yes" if row["within"] else "NO",
            "" if row["noise"] is None else f"{row['noise']:.4f}",
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _launch(processes: int, arguments: list[str], **environment: str) -> int:
    """Start this command on ``processes`` ranks; returns the exit code."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    given = {"OMP_NUM_THREADS": threads, **os.environ, **environment}
    return subprocess.call([*launcher, "-m", "bench.training.reductions", *arguments], env=given)


def main(
    model: Annotated[str, typer.Option(help="A model of `tritonfp8 train`, or the path of a config.")] = "tiny",
    recipe: Annotated[str, typer.Option(help="bf16, or a recipe whose weights are gathered in 8 bits.")] = BASELINE,
    steps: Annotated[int, typer.Option(help="Steps of each contestant and seed.", min=1)] = 1000,
    seeds: Annotated[int, typer.Option(help="Number of seeds.", min=1)] = 3,
    batch_size: Annotated[int, typer.Option(help="Sequences per step and rank.", min=1)] = 4,
    seq_len: Annotated[int, typer.Option(help="Tokens per sequence.", min=1)] = 128,
    compile: Annotated[bool | None, typer.Option(help="Compile each layer. [default: on a GPU]")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. [default: cuda if available]")] = None,
    processes: Annotated[int | None, typer.Option(help="Processes to start without torchrun.", min=1)] = None,
    out: Annotated[Path | None, typer.Option(help="Folder. [default: bench/results/<gpu>/reductions-...]")] = None,
) -> None:
    """Compare reductions of gradients, on ranks that this command or torchrun starts."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if "WORLD_SIZE" not in os.environ:
        count = processes or (torch.cuda.device_count() if kind == "cuda" else CPU_PROCESSES)
        code = _launch(count, sys.argv[1:])
        if kind == "cuda" and not code:
            code = _launch(count, [*sys.argv[1:], "--steps", str(TIMED_STEPS), "--seeds", "1"], **NO_NVLINK)
        sys.exit(code)
    world = int(os.environ["WORLD_SIZE"])
    place = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    compile = kind == "cuda" if compile is None else compile
    without = all(os.environ.get(name) == value for name, value in NO_NVLINK.items())
    folder = out or (
        CPU_FOLDER if kind == "cpu" else results_folder() / f"reductions-{Path(model).stem}-{recipe}-x{world}"
    )
    path = folder / (f"no-nvlink-{FILE}" if without else FILE)
    found: dict[int, list[Row]] = {}
    with joined(place) as ranks:
        for seed in range(seeds):
            settings = Settings(model, (), steps, batch_size, seq_len, world, seed=seed, compile=compile)
            _, found[seed] = compare(settings, ranks, place, lambda *_: None, reduction_contestants(recipe))
            if failed := [row["reason"] for row in found[seed] if "reason" in row]:
                print(f"the run ends here: {failed[0]}", file=sys.stderr, flush=True)
                raise typer.Exit(1)
            if ranks.rank == 0:
                rows = summary(found)
                about = {"command": command_line(), "settings": vars(settings), "without_nvlink": without}
                write_results(path, {**about, "seeds": [*found], "rows": rows, "runs": [*found.values()]})
                show(rows, f"{model}, {recipe}, {world} ranks on {kind}, {steps} steps, seeds 0 to {seed}")


if __name__ == "__main__":
    typer.run(main)
