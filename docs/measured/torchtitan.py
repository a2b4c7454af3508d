"""The tables of whole models in torchtitan, from the data in bench/results/."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.tables import table
from docs.measured.results import data

LAYOUTS = {
    "fsdp": "FSDP2, selective checkpointing",
    "full": "FSDP2, full checkpointing",
    "tp": "TP = 2, selective checkpointing",
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
            speed, peak = f"{row['tokens_per_second']:,.0f}", f"{row['active_gib']:.1f}"
            gathered, loss = f"{row['bytes']['all_gather'] / 1e9:.1f}", f"{row['losses'][-1]:.3f}"
            over = f"{ratio(layout, contender):.3f}"
            lines.append((name, contender, speed, over, f"{row['mfu']:.1%}", peak, gathered, loss))
    columns = (
        "layout", "contender", "tokens/s/GPU", "over bf16", "MFU of bf16's peak", "peak GiB", "gathered GB a step",
        "loss of step 20",
    )  # fmt: skip
    return table(columns, lines)


TABLES: Mapping[str, Callable[[], str]] = {"whole models": whole_models}
"""The function that makes each table, by the name of its block."""
