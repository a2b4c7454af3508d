"""Hugging Face's Trainer on a whole Llama: tokens a second and peak memory of a GPU, and losses, by contender.

    python -m bench.training.client --model 8b --ways lora,full --out bench/results/nvidia-h200
    python -m bench.training.client --largest 80 --out bench/results/nvidia-h200
    python -m bench.training.client --ways full --rows packed --ranks 2

Each run is a process. ``full`` trains all weights: ``bf16`` and ``torchao`` with torch's AdamW, a recipe with the same,
``RECIPE stored`` with weights stored in 8 bits and 8-bit moments, and ``RECIPE stored in backward`` steps each of these
when its gradient is there. ``RECIPE with head`` converts the head, too. ``lora`` trains adapters on a frozen base,
which a recipe stores in 8 bits. ``--largest`` finds the most layers that train in full in so many GiB.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from bench.contest.machine import results_folder, write_results
from bench.training.client_run import BASELINE, CAUSAL, IN_BACKWARD, MODELS, PEER, STORED, Run, train


def in_process(run: Run) -> dict[str, Any] | None:
    """:func:`train` in a process of its own; None if the GPU's memory is too small.

    Raises:
        RuntimeError: it failed for another reason; has the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.ranks)]
        program = ["-m", "bench.training.client", "--one", json.dumps(asdict(run)), "--out", str(path)]
        command = [sys.executable, *(launcher if run.ranks > 1 else []), *program]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            output = (done.stdout + done.stderr)[-4000:]
            if "OutOfMemoryError" in output:
                return None
            raise RuntimeError(f"{run}: exit status {done.returncode}\n{output}")
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def runs_of(
    model: str, ways: list[str], checkpointing: list[str], rows: list[str], contenders: list[str],
    options: dict[str, Any],
) -> Iterator[Run]:  # fmt: skip
    """Each way, with and without checkpointing and padding, by each contender that has it."""
    for way, saved, kind in itertools.product(ways, checkpointing, rows):
        for contender in contenders:
            # A frozen base is stored anyway, and torchao's layers train in high precision only.
            if way == "full" or (STORED not in contender and PEER not in contender):
                yield Run(model, way, contender, saved == "on", kind == "padded", **options)


def largest(run: Run) -> dict[str, Any]:
    """The most layers with which ``run`` does not run out of memory, and what it gave.

    Memory grows by as much with each layer, so two small models tell where to look.
    """
    small = {layers: in_process(replace(run, layers=layers)) for layers in (1, 3)}
    if small[1] is None or small[3] is None:
        raise RuntimeError(f"not even three layers of {run} fit")
    fits, low, high = small[3], 3, None
    a_layer = (small[3]["peak_gib"] - small[1]["peak_gib"]) / 2
    layers = max(4, int(3 + (run.gib - small[3]["peak_gib"]) / a_layer))
    while high is None or high - low > 1:
        found = in_process(replace(run, layers=layers))
        if found is None:
            high = layers
        else:
            fits, low = found, layers
        layers = low + 1 if high is None else max(low + 1, high - 1)
    return {**asdict(run), "layers": low, **fits}


def _line(row: dict[str, Any], bases: dict[Any, float]) -> list[str]:
    place = row["way"], row["checkpointing"], row["padded"]
    if row.get("tokens_per_second") is None:
        return [
            row["way"],
            row["contender"],
            str(row["checkpointing"]),
            str(row["padded"]),
            "out of memory",
            "",
            "",
            "",
        ]
    if row["contender"] == BASELINE:
        bases[place] = row["tokens_per_second"]
    ratio = f"{row['tokens_per_second'] / bases[place]:.3f}" if place in bases else ""
    peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
    figures = [f"{row['tokens_per_second']:.0f}", ratio, peak, f"{row['parameters'] / 1e9:.2f}"]
    return [row["way"], row["contender"], *map(str, place[1:]), *figures]


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table("way", "contender", "checkpointing", "padded", "tokens/s", "over bf16", "GiB", "B parameters")
    bases: dict[Any, float] = {}
    for row in rows:
        table.add_row(*_line(row, bases))
    Console(width=120).print(table)


def _name(kinds: str, options: dict[str, Any]) -> str:
    """The name of the file of such runs."""
    parts = {
        ("regions" if options["regions"] else "compiled"): options["compiled"],
        f"x{options['ranks']}": options["ranks"] > 1,
        "padded": kinds == "padded",
        "mask": options["attention"] != CAUSAL,
    }
    return "-".join(["client", *(name for name, holds in parts.items() if holds)])


def main(
    model: Annotated[str, typer.Option(help=f"Of {', '.join(MODELS)}.")] = "8b",
    ways: Annotated[str, typer.Option(help="full, lora.")] = "full,lora",
    contenders: Annotated[
        str, typer.Option(help="Separated by commas.")
    ] = "bf16,torchao rowwise,rowwise,rowwise stored",
    checkpointing: Annotated[str, typer.Option(help="on, off.")] = "on,off",
    kinds: Annotated[str, typer.Option("--rows", help="packed, padded.")] = "packed,padded",
    layers: Annotated[int, typer.Option(help="0 for the model's.")] = 0,
    batch: Annotated[int, typer.Option(help="Rows of a step.")] = 2,
    length: Annotated[int, typer.Option(help="Tokens of a row.")] = 4096,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 15,
    largest_gib: Annotated[float, typer.Option("--largest", help="Find the largest model in so many GiB.")] = 0.0,
    compiled: Annotated[bool, typer.Option(help="The Trainer compiles.")] = True,
    ranks: Annotated[int, typer.Option(help="GPUs, among which FSDP2 shards the model.", min=1)] = 1,
    regions: Annotated[bool, typer.Option(help="It compiles block by block.")] = False,
    attention: Annotated[str, typer.Option(help="causal, sdpa.")] = CAUSAL,
    one: Annotated[str, typer.Option(hidden=True)] = "",
    out: Annotated[Path | None, typer.Option(help="Folder for client.json.")] = None,
) -> None:
    """Run, print a table, and write after each run; fails if a trainable weight did not change."""
    if one:
        assert out is not None
        row = train(Run(**json.loads(one)))
        if os.environ.get("RANK", "0") == "0":
            out.write_text(json.dumps(row))
        return
    if ranks > max(1, torch.cuda.device_count()):
        raise typer.BadParameter(f"{ranks} ranks need as many GPUs; this machine has {torch.cuda.device_count()}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"batch": batch, "length": length, "steps": steps, "layers": layers, "compiled": compiled}
    options |= {"regions": regions, "attention": attention, "device": device, "ranks": ranks}
    rows: list[dict[str, Any]] = []
    path = (out or results_folder()) / (f"{_name(kinds, options)}.json" if not largest_gib else "client-largest.json")
    if largest_gib:
        first = Run(
            model, "full", BASELINE, batch=1, length=length, steps=3, gib=largest_gib, device=device, compiled=compiled
        )
        ours = (replace(first, contender=f"rowwise{each}") for each in (STORED, IN_BACKWARD))
        for run in (replace(first, dtype="float32"), first, *ours):
            rows.append(largest(run))
            write_results(path, {"rows": rows})
    else:
        lists = (each.split(",") for each in (ways, checkpointing, kinds, contenders))
        for run in runs_of(model, *lists, options):
            rows.append(asdict(run) | (in_process(run) or {}))
            write_results(path, {"rows": rows})
    _show(rows)
    sys.exit(any(_held(row) for row in rows))


def _held(row: dict[str, Any]) -> list[str]:
    """The stuck parameters of a run but norms in bfloat16: at 1 a step of 1e-4 is below half of its last digit."""
    rounds = row["dtype"] == "bfloat16" and STORED not in row["contender"]
    return [name for name in row.get("stuck") or [] if not (rounds and "norm" in name)]


if __name__ == "__main__":
    typer.run(main)
