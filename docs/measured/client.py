"""The tables of whole models in Hugging Face's Trainer, and of reductions of gradients, from bench/results/."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.tables import table
from docs.measured.results import data

COMPILED = {"client.json": "no", "client-compiled.json": "yes"}
REDUCTIONS = {"reductions.json": "NVLink", "no-nvlink-reductions.json": "without peer-to-peer"}


def client_speeds() -> str:
    """Tokens a second and memory of each contender, over bf16's of the same way to train."""
    lines: list[tuple[Any, ...]] = []
    for file, compiled in COMPILED.items():
        bases: dict[Any, float] = {}
        for row in data(file)["rows"]:
            place, speed = (row["way"], row["checkpointing"]), row["tokens_per_second"]
            base = bases.setdefault(place, speed)
            what = row["way"], "yes" if row["checkpointing"] else "no", compiled, row["contender"]
            lines.append((*what, f"{speed:,.0f}", f"{speed / base:.3f}", f"{row['peak_gib']:.1f}"))
    columns = ("trains", "checkpointing", "compiled", "contender", "tokens/s", "over bf16", "peak GiB")
    return table(columns, lines)


def largest_models() -> str:
    """The most layers of Llama 8B's shape that train in 80 GiB."""
    rows = data("client-largest.json")["rows"]
    lines = [
        (
            row["contender"], "float32" if "stored" in row["contender"] else row["dtype"], str(row["layers"]),
            f"{row['parameters'] / 1e9:.2f}", f"{row['parameters'] / rows[0]['parameters']:.2f}",
            f"{row['peak_gib']:.1f}",
        )
        for row in rows
    ]  # fmt: skip
    columns = ("contender", "dtype of gradients", "layers", "billion parameters", "over bf16", "peak GiB")
    return table(columns, lines)


def reductions() -> str:
    """Steps by how gradients are reduced, with NVLink and without."""
    lines: list[tuple[Any, ...]] = []
    for file, link in REDUCTIONS.items():
        rows = data(f"reductions-160m-bf16-x2/{file}")["rows"]
        for row in rows:
            speed = f"{rows[0]['seconds'] / row['seconds']:.3f}"
            sent = f"{row['gradient_bytes'] / rows[0]['gradient_bytes']:.3f}"
            lines.append((link, row["contender"], f"{1e3 * row['seconds']:.1f}", speed, sent))
    return table(("link", "gradients", "step in ms", "speed over float32", "bytes over float32"), lines)


def reduction_losses() -> str:
    """Last losses of several seeds by how gradients are reduced."""
    lines: list[tuple[Any, ...]] = []
    for row in data("../cpu/reductions-tiny/reductions.json")["rows"]:
        losses = ", ".join(f"{loss:.4f}" for loss in row["last_losses"])
        lines.append((row["contender"], losses, f"{row['mean_over_float32']:+.4f}", f"{row['noise']:.4f}"))
    return table(("gradients", "last losses of three seeds", "mean over float32", "standard deviation of seeds"), lines)


TABLES: Mapping[str, Callable[[], str]] = {
    "client speeds": client_speeds,
    "largest models": largest_models,
    "reductions": reductions,
    "reduction losses": reduction_losses,
}
"""The function that makes each table, by the name of its block."""
