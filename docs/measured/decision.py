"""The tables of docs/decide.md: speed by model size, by tokens and by M, and recipes compared."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.tables import table
from docs.measured import results
from tritonfp8 import recipes
from tritonfp8.conversion.selection import cost

RECIPES = ("tensorwise", "rowwise", "blockwise")
TRAINED = "train-160m/training.json"
ON_TWO = "distributed-1b-x2/distributed.json"
# (in features, out features) of linear layers, and tokens of a step, that the cost model is asked for.
LAYERS = ((1024, 1024), (1024, 4096), (2048, 2048), (4096, 4096), (4096, 14336), (8192, 8192))
# Attention and MLP of ViT-B, DiT-XL, ViT-H, SD3 and Flux.
WIDTHS_OF_VISION = (768, 1152, 1280, 1536, 3072)
LAYERS_OF_VISION = tuple((width, times * width) for width in WIDTHS_OF_VISION for times in (1, 4))
TOKENS = tuple(2**n for n in range(6, 18))


def _runs() -> dict[str, Any]:
    return {run["recipe"]: run for run in results.data(TRAINED)["runs"]}


def _on_two() -> dict[str, Any]:
    return {row["contender"]: row for row in results.data(ON_TWO)["rows"]}


def sizes() -> str:
    """Speed of a training step over bf16 by model, and rowwise's peak memory."""
    runs, rows = _runs(), _on_two()
    of_models = results.speed_ups("model", "model")
    peaks = results.peaks()

    def line(name: str, speeds: Mapping[str, float | None], memory: float) -> tuple[str, ...]:
        return name, *(results.text(speeds.get(recipe)) for recipe in RECIPES), results.text(memory)

    lines = [
        line(
            "Llama, 160 M parameters, hidden size 1024",
            {recipe: runs[recipe]["speed_up"] for recipe in RECIPES},
            runs["rowwise"]["peak_bytes"] / runs["bf16"]["peak_bytes"],
        )
    ]
    for name in reversed(results.MODELS):
        shape = results.MODELS[name]
        speeds = {recipe: of_models[f"{recipe} precise"].get(shape) for recipe in RECIPES}
        lines.append(line(name, speeds, peaks["rowwise precise", shape] / peaks["bf16", shape]))
    lines.insert(
        2,
        line(
            "Llama, 1 B parameters, FSDP2 on two GPUs",
            {recipe: rows["bf16"]["seconds"] / rows[recipe]["seconds"] for recipe in RECIPES if recipe in rows},
            rows["rowwise"]["peak_bytes"] / rows["bf16"]["peak_bytes"],
        ),
    )
    return table(("model", *RECIPES, "peak memory, rowwise"), lines)


def first_tokens(recipe: str, sizes: tuple[int, int]) -> int | None:
    """Least power of two of tokens from which on the cost model expects a layer to be faster than in bf16."""
    chosen, found = recipes.get(recipe), None
    for tokens in reversed(TOKENS):
        plain, quantized = (cost.layer_seconds(each, tokens, sizes, cost.H200) for each in (None, chosen))
        if quantized >= plain:
            break
        found = tokens
    return found


def tokens(layers: Sequence[tuple[int, int]] = LAYERS) -> str:
    """Tokens a step from which a layer is faster than in bf16, by the cost model of ``filter="auto"``."""
    lines = [(f"{k} x {n}", *(str(first_tokens(recipe, (k, n)) or "never") for recipe in RECIPES)) for k, n in layers]
    return table(("layer, in x out features", *RECIPES), lines)


def small_m() -> str:
    """Speed of a GEMM, without casts, over bf16's, by M: geometric mean over the shapes of that M."""
    seconds: dict[tuple[str, tuple[int, ...]], dict[str, float]] = {}
    for row in results.data("scaled_matmul.json")["rows"]:
        if row["set"] in (*results.SMALL_M, *results.LARGE) and row["seconds"]:
            seconds.setdefault((row["case"], tuple(row["shape"])), {})[row["contender"]] = row["seconds"]

    def mean(recipe: str, m: int) -> float:
        found = [times for (case, shape), times in seconds.items() if (case, shape[0]) == (recipe, m)]
        return statistics.geometric_mean(times["bf16"] / times["tritonfp8 precise"] for times in found)

    counts = sorted({shape[0] for case, shape in seconds if case == "blockwise"})
    return table(("M", *RECIPES), [(str(m), *(results.text(mean(recipe, m)) for recipe in RECIPES)) for m in counts])


def compared() -> str:
    """The recipes: speed and memory of four Llama 8B layers, and the loss of a model of 160 M parameters."""
    shape = results.MODELS["four Llama 8B layers"]
    speeds, peaks, runs = results.speed_ups("model", "model"), results.peaks(), _runs()

    def line(run: str) -> Sequence[str]:
        contender = f"{run} precise"
        peak = peaks.get((contender, shape))
        return (
            run,
            results.text(speeds.get(contender, {}).get(shape)),
            results.text(peak / peaks["bf16", shape] if peak else None),
            f"{100 * runs[run]['difference']:+.2f} %",
        )

    lines = [line(run) for run in runs if run != "bf16"]
    return table(("recipe", "speed", "peak memory", "final loss over bf16's"), lines)


TABLES: Mapping[str, Callable[[], str]] = {
    "decision recipes": compared,
    "decision sizes": sizes,
    "decision small M": small_m,
    "decision tokens": tokens,
    "decision tokens of vision": lambda: tokens(LAYERS_OF_VISION),
}
"""The function that makes each table, by the name of its block."""
