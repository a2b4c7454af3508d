"""The tables and the figure of predicted steps on many GPUs, from the data in bench/results/scale."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from bench.scale.check import BAND, OUTSIDE
from bench.scale.sources import CONSTANTS, LATENCIES
from bench.scale.step import EXPOSED
from bench.tables import table
from docs.measured.results import data, text

BASE = "bf16"
MODELS = {"llama3-8b": "Llama-3 8B", "llama3-70b": "Llama-3 70B", "qwen3-30b-a3b": "Qwen3-30B-A3B"}
SHOWN, SHOWN_RECIPES = (8, 64, 512, 1024, 2048), (BASE, "rowwise", "tensorwise")
Rows = Mapping[tuple[str, str, str, int], Mapping[str, Any]]


def _rows(name: str) -> Rows:
    found = data(f"../scale/{name}.json")["rows"]
    return {(row["model"], row["series"], row["recipe"], row["gpus"]): row for row in found}


def speeds() -> str:
    """Tokens a second and GPU, and the speed over bf16 in the same layout, by GPUs."""
    rows, lines = _rows("scaling"), []
    for model, series, recipe in dict.fromkeys(key[:3] for key in rows):
        cells = []
        for gpus in SHOWN:
            row, plain = (rows.get((model, series, each, gpus)) for each in (recipe, BASE))
            if row is None or plain is None:
                cells.append("")
                continue
            speed = row["tokens_a_second_a_gpu"]
            cells.append(f"{speed:,.0f} ({text(speed / plain['tokens_a_second_a_gpu'])})")
        if recipe in SHOWN_RECIPES and any(cells):
            lines.append((MODELS[model], series, recipe, *cells))
    return table(("model", "layout", "recipe", *(f"{gpus:,} GPUs" for gpus in SHOWN)), lines)


def choices() -> str:
    """What else rowwise and tensorwise may do on Llama-3 8B, over FSDP2 with the 8-bit gather, by GPUs."""
    rows, model = _rows("scaling"), "llama3-8b"
    lines = []
    for recipe, series in (
        ("rowwise", "FSDP2, bf16 gather"),
        ("rowwise", "FSDP2, no reshard"),
        ("rowwise", "HSDP, 8 ranks share"),
        ("tensorwise", "FSDP2, a reduction a layer"),
    ):
        speeds = [
            rows[model, series, recipe, gpus]["tokens_a_second_a_gpu"]
            / rows[model, "FSDP2", recipe, gpus]["tokens_a_second_a_gpu"]
            for gpus in SHOWN
        ]
        lines.append((recipe, series, *(text(each, 3) for each in speeds)))
    return table(("recipe", "instead", *(f"{gpus:,} GPUs" for gpus in SHOWN)), lines)


def waits() -> str:
    """The share of a step that rowwise with the 8-bit gather waits for collectives, on the most GPUs."""
    rows, gpus = _rows("scaling"), max(SHOWN)
    lines = []
    for (model, series, recipe, of), row in rows.items():
        if of != gpus or recipe != "rowwise" or not row["gather"]:
            continue
        shares = (f"{100 * row['parts'][part] / row['seconds']:.1f} %" for part in EXPOSED)
        lines.append((MODELS[model], series, *shares, f"{row['state_bytes'] / 1e9:.1f} GB"))
    return table(("model", "layout", *EXPOSED, "parameters, gradients and moments of a GPU"), lines)


def eight() -> str:
    """Eight GPUs: predictions that no run was compared with yet."""
    rows = data("../scale/eight.json")["rows"]
    plain = {(row["model"], row["series"]): row["tokens_a_second_a_gpu"] for row in rows if row["recipe"] == BASE}
    lines = []
    for row in rows:
        speed = row["tokens_a_second_a_gpu"]
        gather = "8 bits" if row["gather"] else "bf16"
        name = (MODELS[row["model"]], row["series"], row["recipe"], gather)
        lines.append((*name, f"{speed:,.0f}", text(speed / plain[row["model"], row["series"]])))
    return table(("model", "layout", "recipe", "gather", "tokens/s/GPU", "over bf16"), lines)


def published() -> str:
    """Published speeds of other software and, on an H200, what the model predicts for this package."""

    def line(row: Mapping[str, Any]) -> tuple[str, ...]:
        gather = "8 bits" if row["gather"] else BASE
        settings = (str(row["gpus"]), str(row["tp"]), row["recipe"], gather, f"{row['batch']} x {row['sequence']}")
        speed = f"[{row['speed']:,.0f}]({row['source']}), {row['gpu']}"
        return MODELS[row["model"]], *settings, row["recompute"], speed, f"{row['predicted']:,.0f}"

    header = ("model", "GPUs", "TP", "recipe", "gather", "batch", "recomputed", "published, tokens/s/GPU", "predicted")
    return table(header, map(line, data("../scale/check.json")["published"]))


def check() -> str:
    """Predicted over measured: the range of each kind of comparison, and each one outside of the band."""
    found = data("../scale/check.json")
    groups: dict[str, list[float]] = {}
    for row in found["rows"]:
        what = "bytes" if " bytes" in row["what"] else re.split(" of |, ", row["what"])[0]
        groups.setdefault(f"{what}, in {row['source']}", []).append(row["ratio"])
    for row in found["gloo_seconds"]:
        groups.setdefault("seconds of collectives, 4 ranks of gloo", []).append(row["predicted"] / row["seconds"])
    for row in found["gloo_bytes"]:
        groups.setdefault("bytes of a block, 4 ranks of gloo", []).append(row["predicted"] / row["bytes"])
    lines = []
    for what, ratios in groups.items():
        inside = sum(BAND[0] <= ratio <= BAND[1] for ratio in ratios)
        lines.append((what, text(min(ratios), 3), text(max(ratios), 3), f"{inside} of {len(ratios)}"))
    return table(("what", "lowest", "highest", f"inside of {BAND[0]} to {BAND[1]}"), lines)


def outside() -> str:
    """Each comparison outside of the band, with the reason."""
    ratios = {row["what"]: row["ratio"] for row in data("../scale/check.json")["rows"]}
    return table(("what", "predicted / measured", "reason"), ((w, text(ratios[w]), why) for w, why in OUTSIDE.items()))


def constants() -> str:
    """Constants of the model that come from elsewhere."""
    lines = [(name, f"{each.value:.4g} {each.unit}".strip(), each.source) for name, each in CONSTANTS.items()]
    return table(("constant", "value", "source"), [*lines, ("latencies and shares of the bandwidth", "", LATENCIES)])


def figure() -> Any:
    """Tokens a second and GPU by GPUs: Llama-3 8B with many and few tokens, and the mixture."""
    from matplotlib.figure import Figure

    rows = _rows("scaling")
    panels = (
        ("llama3-8b", "8,192 tokens a GPU", {"FSDP2": "-", "HSDP, 8 ranks share": "--"}),
        ("llama3-8b", "2,048 tokens a GPU", {"FSDP2, 2,048 tokens": "-", "HSDP, 64 ranks share, 2,048 tokens": "--"}),
        ("qwen3-30b-a3b", "16,384 tokens a GPU", {"FSDP2, EP = 8": "-", "FSDP2, EP = 1": ":"}),
    )
    drawn = Figure(figsize=(11, 3.6), layout="constrained")
    for axes, (model, title, series) in zip(drawn.subplots(1, len(panels)), panels, strict=True):
        for color, recipe in enumerate(("bf16", "rowwise", "tensorwise", "blockwise")):
            for name, style in series.items():
                points = [
                    (gpus, row["tokens_a_second_a_gpu"])
                    for (*key, gpus), row in rows.items() if key == [model, name, recipe]
                ]  # fmt: skip
                if points:
                    axes.plot(*zip(*points, strict=True), style, color=f"C{color}", label=f"{recipe}, {name}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(SHOWN, map(str, SHOWN))
        axes.set_ylim(bottom=0)
        axes.set_title(f"{MODELS[model]}, {title}", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.legend(fontsize=6)
        axes.set_xlabel("GPUs", fontsize=8)
    drawn.supylabel("tokens/s/GPU, predicted", fontsize=9)
    return drawn


TABLES: Mapping[str, Callable[[], str]] = {
    "scaling": speeds,
    "scaling choices": choices,
    "scaling waits": waits,
    "scaling of eight": eight,
    "scaling published": published,
    "scaling check": check,
    "scaling outside": outside,
    "scaling constants": constants,
}
"""The function that makes each table, by the name of its block."""
