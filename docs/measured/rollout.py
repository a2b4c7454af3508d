"""The table of what equal bits in training and in generation cost, from the data in bench/results/."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.tables import table
from docs.measured.results import data

ATTENTION, STEP, DECODE, GRAPH, REFRESH = "attention", "step", "decode", "graph", "refresh"
FILES = ("rollout", "rollout-step", "rollout-graph", "rollout-decode")


def costs() -> str:
    """Bars of exact models."""
    rows = [row for name in FILES for row in data(f"{name}.json")["rows"]]

    def of(kind: str, field: str = "seconds") -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for row in rows:
            if row["kind"] == kind:
                found.setdefault(row["tokens"], {})[row["contender"]] = row[field]
        return found

    def line(what: str, bar: str, value: float, holds: bool) -> tuple[Any, ...]:
        return what, bar, f"{value:.3f}", "yes" if holds else "**no**"

    lines = []
    for tokens, times in of(ATTENTION, "both").items():
        value = min(times["cudnn"], times["flash"]) / times["exact"]
        lines.append(
            line(f"attention of {tokens}, forward + backward: speed over torch's", ">= 0.80", value, value >= 0.8)
        )
    for tokens, times in of(STEP).items():
        value = times["exact"] / times["not exact"]
        lines.append(
            line(f"step of layers of Llama 8B, {tokens}: time over not exact", "<= 1.05", value, value <= 1.05)
        )
    for tokens, times in of(GRAPH).items():
        value = times["bf16"] / times["exact"]
        what = f"a token of {tokens} sequences behind 2,048, as a CUDA graph: speed over bf16"
        lines.append(line(what, ">= 1.25", value, value >= 1.25))
    for tokens, times in of(DECODE).items():
        value = times["bf16"] / times["exact"]
        lines.append((f"a token of {tokens} sequences by `generate`: speed over bf16", "", f"{value:.3f}", ""))
    for dtype, times in of(REFRESH).items():
        value = times["refresh"] / times["copy"]
        lines.append(line(f"refresh from {dtype}: time over a copy of the codes", "<= 1.1", value, value <= 1.1))
    return table(("what", "bar", "measured", "holds"), lines)


TABLES: Mapping[str, Callable[[], str]] = {"exact costs": costs}
"""The function that makes each table, by the name of its block."""
