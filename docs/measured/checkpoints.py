"""The table of what checkpoints in few bits cost, from the data in bench/results/."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from bench.tables import table
from docs.measured.results import data

STORED, RECIPE = "decode-mxfp4.json", "mxfp4_weights"


def costs() -> str:
    """Bars of checkpoints."""
    lines: list[tuple[Any, ...]] = []

    def line(what: str, least: float | None, most: float | None, value: float) -> None:
        bar = f"<= {most}" if least is None else f">= {least}"
        holds = value <= most if most is not None else least is not None and value >= least
        lines.append((what, bar, f"{value:.3f}", "yes" if holds else "**no**"))

    def seconds(name: str) -> dict[str, float]:
        return {row["what"]: row["seconds"] for row in data(name)["rows"]}

    decoded = {(row["recipe"], row["tokens"]): row for row in data(STORED)["rows"]}
    line("bytes of weights stored as MXFP4, over bf16", None, 0.27, decoded[RECIPE, 1]["bytes_of_bf16"])
    for tokens in (1, 16):
        mine = decoded[RECIPE, tokens]
        line(f"decode on MXFP4, {tokens} tokens: speed over bf16", 2.2, None, mine["speed_over_bf16"])
        value = decoded["rowwise", tokens]["seconds"] / mine["seconds"]
        line(f"decode on MXFP4, {tokens} tokens: speed over e4m3 codes", 1.4, None, value)
    step, load = seconds("checkpoints-step.json"), seconds("checkpoints-load.json")
    line(
        "step of layers of Llama 8B in `mxfp4_weights`: time over `blockwise`",
        None,
        1.08,
        step[RECIPE] / step["blockwise"],
    )
    for train in ("adapters", "full"):
        what = f'an FP8 checkpoint to a model that trains (`train="{train}"`): time over a copy of its files to the GPU'
        line(what, None, 1.5, load[train] / load["files"])
    for model, name in {"160m": "a model of 160m", "160m-moe": "16 experts, 160m"}.items():
        gains = [
            row["bf16_rounded"] - row[RECIPE]
            for path in ("rounded.json", "rounded-more.json")
            for row in data(path)["rows"]
            if row["model"] == model
        ]
        lower = sum(gain > 0 for gain in gains)
        what = f"{name}, 500 steps: seeds with a lower held-out loss than bf16 whose weights are rounded after"
        mean = f"{lower} of {len(gains)}; mean {statistics.fmean(gains):+.4f} nats a byte"
        lines.append((what, "all", mean, "yes" if lower == len(gains) else "**no**"))
    return table(("what", "bar", "measured", "holds"), lines)


TABLES: Mapping[str, Callable[[], str]] = {"checkpoint costs": costs}
"""The function that makes each table, by the name of its block."""
