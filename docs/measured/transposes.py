"""The tables of transposes from codes beside transposes from values, from the data in bench/results/."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from bench.tables import table
from docs.measured.results import data

BAR, SUFFIX, NOISE = 3, "_codes", "bf16-perturbed"


def speeds() -> str:
    """Time from values over time from codes, and peak memory from codes over it, by layers and recipe."""
    found = [*data("transposes.json")["found"], *data("transposes-experts.json")["found"]]
    recipes = list(dict.fromkeys(row["recipe"] for row in found))
    by = {(row["shape"], row["recipe"]): row for row in found}
    lines = []
    for shape in dict.fromkeys(row["shape"] for row in found):
        rows = [by[shape, recipe] for recipe in recipes]
        lines.append((shape, *(f"{row['speed']:.{BAR}f}, {row['memory']:.{BAR}f}" for row in rows)))
    return table(("layers", *(f"{recipe}: speed, memory" for recipe in recipes)), lines)


def experts() -> str:
    """Time of torch's bf16 over the time of layers of experts, and their peak memory over its peak memory."""
    rows = data("transposes-experts.json")["rows"]
    base = {row["shape"]: row for row in rows if row["recipe"] == "bf16"}

    def cell(row: dict[str, Any]) -> str:
        of = base[row["shape"]]
        return f"{of['seconds'] / row['seconds']:.{BAR}f}, {row['peak_bytes'] / of['peak_bytes']:.{BAR}f}"

    contenders = list(dict.fromkeys((row["recipe"], row["from"]) for row in rows if row["from"]))
    cells = {(row["shape"], row["recipe"], row["from"]): cell(row) for row in rows}
    lines = [(shape, *(cells[shape, *contender] for contender in contenders)) for shape in base]
    return table(("over bf16: speed, memory", *(f"{recipe} from {source}" for recipe, source in contenders)), lines)


def losses() -> str:
    """The held-out loss over bf16's of the same seed: the mean over seeds and its range, by model and recipe."""
    lines = []
    for model in ("160m", "160m-moe"):
        found: dict[str, list[float]] = {}
        for row in data(f"seeds-{model}-codes/seeds.json")["found"]:
            found.setdefault(row["recipe"], []).append(100 * row["held_out"])
        names = [name for name in found if name + SUFFIX in found]
        for name in (NOISE, *names):
            cells = [_range(found[name]), _range(found[name + SUFFIX]) if name in names else ""]
            lines.append((model, name, *cells))
    return table(("model", "recipe", "from values", "from codes"), lines)


def _range(values: list[float]) -> str:
    ends = f"{min(values):+.2f} to {max(values):+.2f}"
    return f"{statistics.fmean(values):+.2f} % ({ends}; {len(values)} seeds)"


def over_ranks() -> str:
    """A step of layers of Llama 8B under sequence parallelism: the median, the fastest, and the bytes of gathers."""
    found = data("distributed-8b-slice-tp2-dp1/distributed.json")
    base, *_ = rows = found["rows"]

    def fastest(row: dict[str, Any]) -> float:
        return min(row["step_seconds"][found["untimed_steps"] :])

    lines = [
        (
            row["contender"],
            f"{1e3 * row['seconds']:.1f} ms",
            f"{base['seconds'] / row['seconds']:.{BAR}f}",
            f"{1e3 * fastest(row):.1f} ms",
            f"{fastest(base) / fastest(row):.{BAR}f}",
            f"{row['bytes']['all_gather'] / base['bytes']['all_gather']:.{BAR}f}",
        )
        for row in rows
    ]
    return table(("contestant", "median step", "over bf16", "fastest step", "over bf16", "all-gather: bytes"), lines)


def kernels_over_ranks() -> str:
    """GPU time of the same step by kinds of kernels."""
    base, *_ = rows = data("kernels-8b-slice-tp2.json")["rows"]
    kinds = ("gemm", "cast", "other", "collective", "busy")

    def line(row: dict[str, Any]) -> tuple[str, ...]:
        times = (f"{1e3 * row[f'{kind}_seconds']:.1f}" for kind in kinds)
        return row["contender"], *times, f"{base['busy_seconds'] / row['busy_seconds']:.{BAR}f}"

    return table(("GPU time, ms", "GEMMs", "casts", "others", "collectives", "all", "over bf16"), map(line, rows))


def experts_over_ranks() -> str:
    """A layer of DeepSeek-V3's experts over two ranks."""
    base, *_ = rows = data("experts-over-ranks-deepseek-v3.json")["rows"]
    lines = [
        (
            row["contestant"],
            f"{1e3 * row['seconds']:.1f} ms",
            f"{base['seconds'] / row['seconds']:.{BAR}f}",
            f"{row['peak_bytes'] / base['peak_bytes']:.{BAR}f}",
            f"{row['all_to_all_bytes'] / base['all_to_all_bytes']:.{BAR}f}",
        )
        for row in rows
    ]
    return table(("experts over two ranks", "step", "over bf16", "peak memory", "all-to-all: bytes"), lines)


TABLES: Mapping[str, Callable[[], str]] = {
    "transposes": speeds,
    "transposes experts": experts,
    "transposes losses": losses,
    "transposes over ranks": over_ranks,
    "transposes kernels": kernels_over_ranks,
    "transposes experts over ranks": experts_over_ranks,
}
"""The function that makes each table, by the name of its block."""
