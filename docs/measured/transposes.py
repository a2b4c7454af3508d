"""The tables of transposes from codes beside transposes from values, from the data in bench/results/."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

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


TABLES: Mapping[str, Callable[[], str]] = {"transposes": speeds, "transposes losses": losses}
"""The function that makes each table, by the name of its block."""
