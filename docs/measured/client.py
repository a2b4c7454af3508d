"""The tables of whole models in Hugging Face's Trainer, and of reductions of gradients, from bench/results/."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.tables import table
from docs.measured.results import data
from tritonfp8.advice import kernel_seconds

# How the Trainer runs, by the file that has it.
RUNS = {
    "client-compiled.json": "compiled",
    "client-regions.json": "compiled by block",
    "client-compiled-mask.json": "compiled, attention by a mask",
    "client.json": "eager",
    "client-padded.json": "eager, padded rows",
}
# Parts of the names of kernels of torch and cuDNN.
OF_TORCH = {"sdpa": "attention", "cudnn": "attention", "multi_tensor_apply": "optimizer, norm of gradients"}
OF_KINDS = {"gemm_seconds": "GEMMs", "cast_seconds": "casts of our kernels"}
KINDS = ("GEMMs", "attention", "casts of our kernels", "optimizer, norm of gradients")
REDUCTIONS = {"reductions.json": "NVLink", "no-nvlink-reductions.json": "without peer-to-peer"}


def client_speeds() -> str:
    """Tokens a second and memory of each contender, over bf16's of the same way to train."""
    lines: list[tuple[Any, ...]] = []
    for file, runs in RUNS.items():
        bases: dict[Any, float] = {}
        for row in data(file)["rows"]:
            place, speed = (row["way"], row["checkpointing"]), row["tokens_per_second"]
            base = bases.setdefault(place, speed)
            what = runs, row["way"], "yes" if row["checkpointing"] else "no", row["contender"]
            lines.append((*what, f"{speed:,.0f}", f"{speed / base:.3f}", f"{row['peak_gib']:.1f}"))
    columns = ("the Trainer runs", "trains", "checkpointing", "contender", "tokens/s", "over bf16", "peak GiB")
    return table(columns, lines)


def _kind(kernel: str) -> str | None:
    """One of :data:`KINDS`, by the name of a kernel; None for others."""
    of_torch = next((kind for part, kind in OF_TORCH.items() if part in kernel), None)
    (of_kind,) = (kind for kind, seconds in kernel_seconds([(kernel, 1.0)]).items() if seconds)
    return of_torch or OF_KINDS.get(of_kind)


def client_kernels() -> str:
    """Where the GPU time of a step goes, with checkpointing, compiled as a whole."""
    lines: list[tuple[Any, ...]] = []
    for file in ("client-compiled.json", "client-compiled-mask.json"):
        for row in data(file)["rows"]:
            profile = row["profile"]
            parts = dict.fromkeys(KINDS, 0.0)
            for name, (seconds, _) in profile["kernels"].items():
                if kind := _kind(name):
                    parts[kind] += seconds
            times = (*parts.values(), profile["busy"] - sum(parts.values()), profile["busy"], profile["span"])
            lines.append((RUNS[file], row["contender"], *(f"{1e3 * x:.0f}" for x in times)))
    return table(("the Trainer runs", "contender", *KINDS, "other kernels", "GPU busy", "step"), lines)


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
    "client kernels": client_kernels,
    "largest models": largest_models,
    "reductions": reductions,
    "reduction losses": reduction_losses,
}
"""The function that makes each table, by the name of its block."""
