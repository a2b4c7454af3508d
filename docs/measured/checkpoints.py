"""The table of what checkpoints in few bits cost, from the data in bench/results/."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from bench.tables import table
from docs.measured.results import data

STORED = {"": "decode-mxfp4.json", " experts of Qwen3-30B-A3B": "decode-mxfp4-qwen3-moe.json"}
RECIPE, GEMMS = "mxfp4_weights", "packed.json"


def costs() -> str:
    """Bars of checkpoints."""
    lines: list[tuple[Any, ...]] = []

    def line(what: str, least: float | None, most: float | None, value: float) -> None:
        bar = f"<= {most}" if least is None else f">= {least}"
        holds = value <= most if most is not None else least is not None and value >= least
        lines.append((what, bar, f"{value:.3f}", "yes" if holds else "**no**"))

    def seconds(name: str) -> dict[str, float]:
        return {row["what"]: row["seconds"] for row in data(name)["rows"]}

    for of, name in STORED.items():
        decoded = {(row["recipe"], row["tokens"]): row for row in data(name)["rows"]}
        if not of:
            line("bytes of weights stored as MXFP4, over bf16", None, 0.27, decoded[RECIPE, 1]["bytes_of_bf16"])
        for tokens in (1, 16):
            mine, what = decoded[RECIPE, tokens], f"decode on MXFP4{of}, tokens: {tokens}; speed"
            line(f"{what} over bf16", 2.2, None, mine["speed_over_bf16"])
            line(f"{what} over e4m3 codes", 1.4, None, decoded["rowwise", tokens]["seconds"] / mine["seconds"])
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


def gemms() -> str:
    """GEMMs on codes, over the same on e4m3 codes that are expanded already, and over bf16."""
    lines = [
        (
            f"{row['experts']} experts with tokens" if row["kind"] == "grouped" else "dense",
            f"{row['n']} x {row['k']}", f"{row['tokens']:,}", f"{1e6 * row['mxfp4_seconds']:.1f}",
            f"{row['speed_over_e4m3']:.2f}", f"{row['speed_over_bf16']:.2f}",
            f"{row['speed_over_expanded first']:.2f}" if row["kind"] == "grouped" else "",
        )
        for row in data(GEMMS)["rows"]
    ]  # fmt: skip
    columns = ("weights", "N x K", "tokens of each", "us", "over e4m3", "over bf16", "over expanding first")
    return table(columns, lines)


TABLES: Mapping[str, Callable[[], str]] = {"checkpoint costs": costs, "gemms on packed codes": gemms}
"""The function that makes each table, by the name of its block."""
