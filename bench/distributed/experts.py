"""Experts over ranks, forward and backward: time, peak memory and bytes of the all-to-alls, by what travels.

    torchrun --nproc-per-node 2 -m bench.distributed.experts --shape deepseek-v3

Each rank has its own tokens, as many as the shape says, and its part of the experts.
"""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table

import tritonfp8
from bench.contest.machine import results_folder, write_results
from bench.distributed.ranks import joined
from bench.models import mixture, training_step
from bench.shapes import SHAPES, Shape
from tritonfp8 import recipes
from tritonfp8.distributed import count_collective_bytes, shard_experts
from tritonfp8.training import timers

BASELINE = "bf16"
WARM_UP = 3


class Contestant(NamedTuple):
    """A recipe, in which transposes are made from ``transposed_from``, and the payload of its all-to-alls."""

    recipe: str
    payload: str = "float8"
    transposed_from: str = "values"

    @property
    def name(self) -> str:
        """Its name in the table."""
        if self.recipe == BASELINE:
            return BASELINE
        sent = "codes" if self.payload == "float8" else "high precision"
        return f"{self.recipe} from {self.transposed_from}, sends {sent}"


def contestants(names: tuple[str, ...]) -> list[Contestant]:
    """bf16; of each recipe rows that travel in high precision, as codes, and as codes that are read on arrival."""
    found = [Contestant(BASELINE, "high_precision")]
    for name in names:
        ways = (("high_precision", "values"), ("float8", "values"), ("float8", "codes"))
        found += [Contestant(name, *way) for way in ways]
    return found


def step_of(contestant: Contestant, shape: Shape, device: torch.device) -> Callable[[], Any]:
    """Forward and backward of a layer whose experts are sharded over all ranks."""
    layer = mixture(shape, device, tritonfp8.Float8Experts, BASELINE)
    if contestant.recipe != BASELINE:
        recipe = recipes.get(contestant.recipe, transposed_from=contestant.transposed_from)
        tritonfp8.swap_recipe(layer, recipe)
    mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    shard_experts(layer, mesh, contestant.payload)
    generator = torch.Generator(device).manual_seed(1 + torch.distributed.get_rank())
    tokens, hidden = shape.size[0], shape.size[3]
    x, grad = (torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(2))
    return training_step(layer, layer, x.requires_grad_(), grad)


def seconds(step: Callable[[], Any], device: torch.device, steps: int) -> list[float]:
    """The time of each of ``steps`` steps, which begin on all ranks together, in seconds."""
    found = []
    for _ in range(steps):
        torch.distributed.barrier()
        timers.synchronize(device)
        began = time.perf_counter()
        step()
        timers.synchronize(device)
        found.append(time.perf_counter() - began)
    return found


def measure(contestant: Contestant, shape: Shape, device: torch.device, steps: int) -> dict[str, Any]:
    """The row of a contestant on this rank."""
    step = step_of(contestant, shape, device)
    seconds(step, device, WARM_UP)
    with count_collective_bytes() as traffic:
        step()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    before = timers.allocated(device)
    step()
    peak = timers.peak_bytes(device, before)
    row = {"contestant": contestant.name, "seconds": statistics.median(seconds(step, device, steps))}
    return row | {"peak_bytes": peak, "all_to_all_bytes": traffic.bytes["all_to_all"]}


def show(rows: list[dict[str, Any]], title: str) -> None:
    """Print the table."""
    table = Table(title=title)
    for column in ("contestant", "step", "over bf16", "peak memory", "all-to-all"):
        table.add_column(column)
    base = rows[0]
    for row in rows:
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.3f} GiB"
        table.add_row(
            row["contestant"], f"{1e3 * row['seconds']:.3f} ms", f"{base['seconds'] / row['seconds']:.3f} x", peak,
            f"{row['all_to_all_bytes'] / base['all_to_all_bytes']:.3f} of bf16",
        )  # fmt: skip
    Console(width=120).print(table)


def main(
    shape: Annotated[str, typer.Option(help="A set of shapes of experts.")] = "deepseek-v3",
    names: Annotated[str, typer.Option("--recipes", help="Separated by commas.")] = "rowwise,blockwise",
    steps: Annotated[int, typer.Option(help="Timed steps.", min=1)] = 20,
    out: Annotated[Path | None, typer.Option(help="Folder for experts-over-ranks-SHAPE.json.")] = None,
) -> None:
    """Compare what travels, on the ranks that torchrun started."""
    (chosen,) = (each for each in SHAPES["experts"] if each.set == shape)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    with joined(device) as ranks:
        rows = [measure(each, chosen, device, steps) for each in contestants(tuple(names.split(",")))]
        for row in rows:
            # The slowest rank counts.
            row["seconds"] = max(each for each in ranks.exchange(row["seconds"]))
        if ranks.rank == 0:
            path = (out or results_folder()) / f"experts-over-ranks-{shape}.json"
            write_results(path, {"ranks": ranks.size, "size": chosen.size, "rows": rows})
            show(rows, f"{shape}, experts over {ranks.size} ranks")


if __name__ == "__main__":
    typer.run(main)
