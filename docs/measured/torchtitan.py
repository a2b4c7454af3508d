"""The tables of whole models in torchtitan, from the data in bench/results/."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.distributed.bars import mean_losses
from bench.tables import table
from docs.measured.results import data

# One run each, whose contenders are compared with its bf16.
LAYOUTS = {
    "fsdp": "FSDP2, selective checkpointing",
    "fsdp-100": "the same, 100 steps",
    "fsdp-head": "the same, another run",
    "fsdp-graph": "the same, as CUDA graph",
    "none": "FSDP2, no checkpointing",
    "full": "FSDP2, full checkpointing",
    "tp": "TP = 2, selective checkpointing",
    "tp-graph": "the same, as CUDA graph",
}


def runs(layout: str) -> dict[str, dict[str, Any]]:
    """Rows of Llama-3-8B in a layout, by contender."""
    return {row["contender"]: row for row in data(f"torchtitan-8b-{layout}.json")["rows"]}


def ratio(layout: str, contender: str) -> float:
    """Tokens a second of a contender over bf16's in that layout."""
    rows = runs(layout)
    return float(rows[contender]["tokens_per_second"] / rows["bf16"]["tokens_per_second"])


def whole_models() -> str:
    """Speed and memory of each contender in each layout."""
    lines = []
    for layout, name in LAYOUTS.items():
        for contender, row in runs(layout).items():
            # The graph is recorded in the second step, and its memory is not counted afterwards.
            peak = max(row["active_gib_of_windows"]) if row.get("graphs") else row["active_gib"]
            gathered = "" if row.get("graphs") else f"{row['bytes']['all_gather'] / 1e9:.1f}"
            speed, peak, loss = f"{row['tokens_per_second']:,.0f}", f"{peak:.1f}", f"{row['losses'][-1]:.3f}"
            over = f"{ratio(layout, contender):.3f}"
            lines.append((name, contender, speed, over, f"{row['mfu']:.1%}", peak, gathered, loss))
    columns = (
        "layout", "contender", "tokens/s/GPU", "over bf16", "MFU of bf16's peak", "peak GiB", "gathered GB a step",
        "last loss",
    )  # fmt: skip
    return table(columns, lines)


def _titan_rows(file: str) -> list[tuple[str, str, list[float], bool]]:
    names = {"tp": "TP = {}", "ep": "EP = {}"}
    found = []
    for row in data(f"../cpu/eight/torchtitan-{file}-losses.json")["rows"]:
        degrees = " x ".join(name.format(row[key]) for key, name in names.items() if row[key] > 1)
        # Tensor parallelism over all ranks leaves FSDP2 none.
        layout = f"torchtitan, {degrees or 'FSDP2'}, {row['processes']} ranks"
        sent = "" if row["payload"] == "float8" or row["contender"] == "bf16" else ", sends high precision"
        found.append((layout, row["contender"] + sent, row["losses"], row["gather"]))
    return found


def _layer_rows(ending: str, layout: str) -> list[tuple[str, str, list[float], bool]]:
    rows = data(f"../cpu/eight/experts-over-ranks-tiny-1-layers-{ending}.json")["rows"]
    return [(layout, row["contender"], mean_losses(row), ending.endswith("gather")) for row in rows]


def eight_ranks() -> str:
    """Losses on ranks of gloo in the layouts of eight GPUs, and whether the 8-bit gather leaves them."""
    spread = "mixture of transformers, EP = 4, 8 ranks"
    rows = [
        *(row for file in ("debug-x8-fsdp-wide", "debug-x8-tp-tp8-tp+wide") for row in _titan_rows(file)),
        *_layer_rows("ep4", spread), *_layer_rows("ep4-gather", spread),
        *_layer_rows("ep4-tp2", "mixture of transformers, TP = 2 x EP = 4, 8 ranks"),
        *_titan_rows("debug-moe-x4-ep4-ep4+exact-tp+ep4-tp+ep4+exact"),
    ]  # fmt: skip
    runs: dict[tuple[str, str], dict[bool, list[float]]] = {}
    for layout, contender, losses, gather in rows:
        runs.setdefault((layout, contender), {})[gather] = losses
    lines = []
    for (layout, contender), by_gather in runs.items():
        losses = next(iter(by_gather.values()))
        same = "the same" if len({tuple(each) for each in by_gather.values()}) == 1 else "others"
        bits = same if contender != "bf16" and len(by_gather) > 1 else ""
        lines.append((layout, contender, str(len(losses)), f"{losses[0]:.4f}", f"{losses[-1]:.4f}", bits))
    return table(
        ("layout", "contender", "steps", "first loss", "last", "bits of losses without the 8-bit gather"), lines
    )


def expert_layers() -> str:
    """Layers of a mixture whose experts are over two GPUs."""
    rows = data("experts-over-ranks-qwen3-30b-a3b-8-layers-gather-compiled.json")["rows"]
    lines = []
    for row in rows:
        sent, losses = sum(row["bytes"][kind] for kind in ("all_to_all", "all_gather")), mean_losses(row)
        speed = f"{rows[0]['seconds'] / row['seconds']:.3f}"
        times = f"{1e3 * row['seconds']:.0f}", speed, f"{row['peak_bytes'] / 2**30:.1f}", f"{sent / 1e9:.1f}"
        lines.append((row["contender"], *times, f"{losses[-1]:.3f}"))
    return table(("contender", "step in ms", "speed over bf16", "peak GiB", "GB sent and gathered", "last loss"), lines)


TABLES: Mapping[str, Callable[[], str]] = {
    "whole models": whole_models,
    "eight ranks": eight_ranks,
    "expert layers": expert_layers,
}
"""The function that makes each table, by the name of its block."""
