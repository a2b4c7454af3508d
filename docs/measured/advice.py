"""The table of what ``tritonfp8 advise`` said of public models, from the data in bench/results/<GPU>/advice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping

from bench.tables import table
from docs.measured.results import data

VISION = ("vit-huge", "dit-xl-2")
MODELS = {
    "qwen3-4b": "Qwen3-4B, 8192 tokens",
    "olmoe-1b-7b": "OLMoE-1B-7B, 8192 tokens",
    "vit-huge": "ViT-Huge/14, 64 images",
    "dit-xl-2": "DiT-XL/2 at 512 pixels, 8 images",
    "modernbert-large": "ModernBERT-large, 8192 tokens",
}


def advised(models: Iterable[str] = MODELS) -> str:
    """By model: the recommendation, its speed over bf16 in the whole model, and predicted over measured times."""
    lines = []
    for name in models:
        found = data(f"advice/{name}.json")
        steps = [row for row in found["rows"] if row["part"] == "checks"]
        seconds = [row["timing"]["seconds"] for row in steps]
        speed = f"{seconds[0] / seconds[-1]:.2f}" if len(seconds) > 1 else ""
        ratios = [f"{row['contender']} {row['predicted_seconds'] / row['timing']['seconds']:.2f}" for row in steps]
        lines.append((MODELS[name], found["recommendation"]["text"].partition(";")[0], speed, ", ".join(ratios)))
    return table(("model", "recommendation", "measured: over bf16", "predicted over measured step"), lines)


def blocks(models: Iterable[str] = MODELS) -> str:
    """By model: rowwise's speed over bf16 in its blocks, eager and compiled, and as CUDA graphs."""
    lines = []
    for name in models:
        rows = [row for row in data(f"advice/{name}.json")["rows"] if row["part"] == "blocks"]

        def total(contender: str, mode: str, key: str, rows: list[dict] = rows) -> float:
            mine = [row for row in rows if (row["contender"], row["mode"]) == (contender, mode)]
            return sum(row["count"] * row["timing"][key] for row in mine)

        for mode, how in (("none", "eager"), ("block", "compiled by block")):
            plain, ours = (total(contender, mode, "seconds") for contender in ("bf16", "rowwise"))
            graph = total("bf16", mode, "gpu_seconds") / total("rowwise", mode, "gpu_seconds")
            host = total("rowwise", mode, "host_seconds") / total("rowwise", mode, "gpu_seconds")
            lines.append((MODELS[name], how, f"{plain / ours:.2f}", f"{graph:.2f}", f"{host:.2f}"))
    head = ("blocks of", "mode", "rowwise over bf16", "the same as CUDA graphs", "rowwise: host time over GPU time")
    return table(head, lines)


TABLES: Mapping[str, Callable[[], str]] = {
    "advice": advised,
    "advice blocks": blocks,
    "advice vision": functools.partial(blocks, VISION),
}
"""The function that makes each table, by the name of its block."""
