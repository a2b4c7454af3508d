"""What training from checkpoints in few bits costs: ``python -m bench.training.checkpoints``.

step     forward and backward of compiled layers of Llama 8B, by recipe, over blockwise
load     an FP8 checkpoint of these layers to a model that trains, over a copy of its files to the device
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import tritonfp8
from bench.contest.machine import results_folder, write_results
from bench.inference.rollout import SMOKE, Sizes, model, seconds, training_step
from tritonfp8.integrations.transformers import from_pretrained
from tritonfp8.training import timers

ROUNDS = 5
# Whole blocks of 128 x 128.
SMALL = SMOKE._replace(heads=(4, 4, 32), ffn=256)


def steps(sizes: Sizes, recipes: list[str], device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows of a training step, by recipe."""
    batch, length = sizes.tokens[0]
    x = torch.randn(batch, length, sizes.heads[0] * sizes.heads[2], device=device, dtype=torch.bfloat16)
    calls = {}
    for recipe in ("bf16", *recipes):
        made = model(sizes, device)
        tritonfp8.convert(made, recipe, filter=lambda module, name: "lm_head" not in name)
        calls[recipe] = training_step(made, x, {})
    for recipe, found in zip(calls, seconds(list(calls.values()), device), strict=True):
        yield {"kind": "step", "tokens": f"{batch} x {length}", "what": recipe, "seconds": found}


def loads(sizes: Sizes, device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows of loading: the files as they are, and models, of files that were read before."""
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        tritonfp8.export.save(model(sizes, device), folder, "fine_grained")
        files = sorted(Path(folder).glob("*.safetensors"))
        size = sum(each.stat().st_size for each in files)

        def copy() -> Any:
            return [load_file(each, device=str(device)) for each in files]

        ways = {
            "files": copy,
            "adapters": lambda: from_pretrained(folder, train="adapters", device=device),
            "full": lambda: from_pretrained(folder, train="full", device=device),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, load in ways.items():
                timers.synchronize(device)
                began = time.perf_counter()
                found = load()
                timers.synchronize(device)
                times[name].append(time.perf_counter() - began)
                del found
        for name, all_times in times.items():
            # The first reads the disk, or compiles.
            yield {"kind": "load", "bytes": size, "what": name, "seconds": min(all_times)}


def main(
    only: Annotated[str, typer.Option(help="Of step and load, separated by commas.")] = "step,load",
    recipes: Annotated[str, typer.Option(help="Comma-separated.")] = "blockwise,rowwise,mxfp4_weights",
    smoke: Annotated[bool, typer.Option(help="Small sizes, which say nothing about speed.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for checkpoints.json.")] = None,
) -> None:
    """Measure, print a line for each row, and write."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes, rows = SMALL if smoke or device.type == "cpu" else Sizes(), []
    for kind in only.split(","):
        for row in steps(sizes, recipes.split(","), device) if kind == "step" else loads(sizes, device):
            rows.append(row)
            write_results((out or results_folder()) / "checkpoints.json", {"sizes": sizes._asdict(), "rows": rows})
    table = Table("kind", "what", "ms")
    for row in rows:
        table.add_row(row["kind"], row["what"], f"{1e3 * row['seconds']:.3f}")
    Console(width=80).print(table)


if __name__ == "__main__":
    typer.run(main)
