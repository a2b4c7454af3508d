"""The tables of what limits a figure: kernels of a step, power of GEMMs, host time of a call. Data: bench/results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.contest.bars import BARS, GROUPED_BARS
from bench.contest.cases import MODEL, MODEL_KERNELS
from bench.contest.grouped import EXPERTS, EXPERTS_KERNELS
from bench.contest.judge import Bar
from bench.limits.host import GRAPH, LAUNCH, MEMORY, REST
from bench.limits.power import OWN, RANDOM, TORCH, ZERO
from bench.limits.step import CALLS, LAUNCHES
from bench.models import BIASED, CONFIGS
from bench.scale.compute import CODE, HIGH, cast_bytes, copy_rate
from bench.tables import size_name, table
from docs.measured.results import data, text
from tritonfp8.tuning.matmul_space import LARGEST_FAST

# FP8 FLOPs of a multiprocessor in a cycle: NVIDIA H100 Tensor Core GPU Architecture (2022), 4 tensor cores of 1024
# multiplications and additions each.
DENSE_FLOPS = 4 * 1024 * 2


OVER = ("over bf16", "casts as fast as a copy, ms", "over bf16 then", "bar")
Line = tuple[str, ...]
# Geometric mean, and each shape.
FAST, PRECISE = "rowwise fast", "rowwise precise"
UNTUNED_BARS = {f"{FAST}, over torch": (1.00, 0.96), "tensorwise precise, over torch": (1.01, 0.97)}


def least_bytes(
    recipe: str, name: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, batch: int, sequence: int
) -> float:
    """What the casts of a model of ``bench.models`` read and write at least, forward and backward."""
    head = CONFIGS.get(name, {}).get("head_dim", hidden // heads)
    q, kv, branches = heads * head, kv_heads * head, 1 if name in BIASED else 2
    inputs = 2 * hidden + q + ffn
    gradients = q + 2 * kv + 2 * hidden + branches * ffn
    weights = hidden * (2 * q + 2 * kv + (branches + 1) * ffn)
    return layers * cast_bytes(recipe, batch * sequence * (inputs + gradients), weights)


def limits() -> str:
    """Where a step of each model goes, and how fast it would be if its casts were as fast as a copy."""
    rows = data("model.json")["rows"]
    speed = copy_rate()
    parts = {(row["name"], row["contender"]): row for row in rows if row["case"] == MODEL_KERNELS.name}

    def line(bar: Bar) -> tuple[str, ...]:
        plain, ours = parts[bar.shape, "bf16"], parts[bar.shape, bar.contender]
        spent = (plain["gemm_seconds"], plain["other_seconds"])
        spent = (*spent, *(ours[f"{part}_seconds"] for part in ("gemm", "cast", "other")))
        copied = least_bytes(bar.contender.split()[0], plain["name"], *plain["shape"]) / speed
        fastest = ours["gemm_seconds"] + copied + plain["other_seconds"]
        over = (text(plain["seconds"] / ours["seconds"]), text(1e3 * copied, 1), text(plain["seconds"] / fastest))
        return bar.shape or "", bar.contender.split()[0], *(text(1e3 * each, 1) for each in spent), *over, text(bar.bar)

    wanted = [bar for bar in BARS if (bar.case, bar.over, bar.quantity) == (MODEL.name, "bf16", "speed-up")]
    header = ("layers of", "recipe", "bf16: GEMMs, ms", "others", "recipe: GEMMs, ms", "casts", "others")
    return table(
        (*header, *OVER),
        [line(bar) for bar in wanted if (bar.shape, bar.contender) in parts],
    )


def least_bytes_of_experts(tokens: int, top_k: int, experts: int, hidden: int, inside: int) -> int:
    """What casts, SwiGLU and sums of a layer of experts read and write at least in ``rowwise``, forward and backward.

    Each tensor counts once a pass, also where it is read for its amaxes first, or a row for each of its experts.
    """
    rows, weights = tokens * top_k, experts * 3 * inside * hidden
    # For the output and for the gradient of the input.
    of_weights = 2 * weights * (HIGH + CODE)
    # The input, cast by token, picked by row, and cast to its columns.
    of_input = tokens * hidden * 2 * (HIGH + CODE) + rows * hidden * 2 * CODE
    # SwiGLU, then the casts of its result. Backward does the same, from the gradient of its result.
    of_swiglu = rows * inside * ((2 + 1) * HIGH + (HIGH + 2 * CODE))
    of_swiglu += rows * inside * ((1 + 2 + 2) * HIGH + 2 * (HIGH + 2 * CODE))
    # Sums of the rows of a token forward and backward, products for the router's gradient, both casts of the gradient.
    of_output = 3 * (rows + tokens) * hidden * HIGH + tokens * hidden * HIGH + rows * hidden * 2 * CODE
    return of_weights + of_input + of_swiglu + of_output


SPENT = ("layer of", "bf16: GEMMs, ms", "others", "rowwise: GEMMs, ms", "casts, SwiGLU and sums", "others", "over bf16")


def _mixture(path: str, add: Callable[[Sequence[int], Mapping[str, float], float], Line]) -> list[Line]:
    """Where the time of each layer of experts goes, and what ``add`` finds by its sizes, our times and bf16's."""
    rows = data(path)["rows"]
    shapes = {row["set"]: row["shape"] for row in rows if row["case"] == EXPERTS.name}
    parts = {(row["set"], row["contender"]): row for row in rows if row["case"] == EXPERTS_KERNELS.name}

    def line(bar: Bar) -> Line:
        (shape,) = bar.sets
        plain, ours = parts[shape, bar.over], parts[shape, bar.contender]
        kept = plain["cast_seconds"] + plain["other_seconds"]
        spent = (plain["gemm_seconds"], kept, *(ours[f"{part}_seconds"] for part in ("gemm", "cast", "other")))
        over = (text(plain["seconds"] / ours["seconds"]), *add(shapes[shape], ours, plain["seconds"]))
        return shape, *(text(1e3 * each, 1) for each in spent), *over, text(bar.bar)

    return [line(bar) for bar in GROUPED_BARS if (bar.case, bar.quantity) == (EXPERTS.name, "speed-up")]


def mixture_limits() -> str:
    """Where the time of a layer of experts goes, and how fast it would be if its casts were as fast as a copy."""
    speed = copy_rate()

    def fastest(shape: Sequence[int], ours: Mapping[str, float], plain: float) -> Line:
        copied = least_bytes_of_experts(*shape) / speed
        return text(1e3 * copied, 1), text(plain / (ours["gemm_seconds"] + copied + ours["other_seconds"]))

    return table((*SPENT, *OVER[1:]), _mixture("experts.json", fastest))


def mixture_kernels() -> str:
    """Where the time of a layer of experts goes on an H100."""
    return table((*SPENT, "bar"), _mixture("../nvidia-h100/experts.json", lambda *_: ()))


def power() -> str:
    """Clock, power and energy of GEMMs on random codes, and the speed of the same GEMM on codes that are all zero."""
    found = data("power.json")
    rows = {
        (tuple(row["shape"]), row["case"], row["accumulation"], row["contender"], row["codes"]): row
        for row in found["rows"]
    }
    lines = []
    for shape, case, accumulation in dict.fromkeys(key[:3] for key in rows):
        for contender in (OWN, TORCH):
            row, zero = (rows[shape, case, accumulation, contender, codes] for codes in (RANDOM, ZERO))
            rate = row["flops"] / row["seconds"]
            peak = found["multiprocessors"] * DENSE_FLOPS * row["mhz"] * 1e6
            figures = (
                f"{rate / 1e12:.0f}",
                f"{row['mhz']:.0f}",
                f"{row['watts']:.0f}",
                text(1e12 * row["watts"] / rate),
            )
            shares = (rate / peak, row["seconds"] / zero["seconds"])
            lines.append((size_name(shape), f"{case}, {accumulation}", contender, *figures, *map(text, shares)))
    header = ("M x N x K", "GEMM", "of", "TFLOP/s", "MHz", "W", "J a TFLOP", "of the peak at this clock")
    return table((*header, "zeros: speed over random codes"), lines)


def untuned() -> str:
    """Speed of GEMMs that no table of tuned configurations has over torch's, and of fast ones over precise ones."""
    ratios: dict[tuple[str, str], dict[tuple[int, ...], float]] = {}
    rows = {(row["variant"], row["set"], tuple(row["shape"])): row for row in data("ranking.json")["rows"]}
    for (variant, of, shape), row in rows.items():
        if row["torch"] is not None:
            ratios.setdefault((f"{variant}, over torch", of), {})[shape] = row["over_torch"]
        if variant == FAST:
            wide = row["torch"] / row["seconds"][LARGEST_FAST.name]
            ratios.setdefault((f"{FAST} in tiles of 128 x 256, over torch", of), {})[shape] = wide
            precise = rows[PRECISE, of, shape]
            over = precise["seconds"][precise["choice"]] / row["seconds"][row["choice"]]
            ratios.setdefault((f"{FAST}, over {PRECISE}", of), {})[shape] = over
    lines = []
    for (what, of), speeds in sorted(ratios.items(), key=lambda item: item[0][1], reverse=True):
        lowest = min(speeds, key=lambda shape: speeds[shape])
        mean, bars = statistics.geometric_mean(speeds.values()), UNTUNED_BARS.get(what)
        bar = "" if bars is None else f"{bars[0]:.2f}, each {bars[1]:.2f}"
        holds = "" if bars is None else "yes" if mean >= bars[0] and speeds[lowest] >= bars[1] else "**no**"
        lines.append((what, of, text(mean, 3), f"{text(speeds[lowest], 3)} at {size_name(lowest)}", bar, holds))
    return table(("GEMM", "shapes", "mean", "lowest", "bar", "holds"), lines)


def calls() -> str:
    """The parts of a call of an op in a compiled graph."""
    found = {(row["op"], row["part"]): f"{1e6 * row['host_seconds']:.1f} us" for row in data("host.json")["rows"]}
    parts = ("all", GRAPH, LAUNCH, MEMORY, REST)
    lines = [(op, *(found.get((op, part), "") for part in parts)) for op in dict.fromkeys(op for op, _ in found)]
    names = ("the graph's own", "the launch", "memory of the results", "the rest of the call")
    return table(("op, [128, 768, 768]", "host time", *names), lines)


def steps() -> str:
    """A step of blocks of a diffusion transformer: time, host time, and how often the host calls us and launches."""
    rows = data("step.json")["rows"]
    plain = {row["way"]: row["seconds"] for row in rows if row["contender"] == "bf16"}

    def line(row: dict[str, Any]) -> tuple[str, ...]:
        # Three of each of the four linear layers of a block.
        gemms = 12 * row["size"][0]
        counts = [f"{row[name] / gemms:.2f}" if row.get(name) else "" for name in (CALLS, LAUNCHES)]
        times = (f"{1e3 * row['seconds']:.1f} ms", text(plain[row["way"]] / row["seconds"]))
        launch = f"{1e6 * row[f'{LAUNCHES} seconds'] / row[LAUNCHES]:.1f} us" if row.get(LAUNCHES) else ""
        return row["way"], row["contender"], *times, f"{1e3 * row['host_seconds']:.1f} ms", *counts, launch

    header = ("step", "over bf16", "host time", f"{CALLS}, a GEMM", f"{LAUNCHES}, a GEMM", "host time of a launch")
    return table(("way", "contestant", *header), map(line, rows))


def chosen_steps() -> str:
    """A step of each model that ``filter="auto"`` converts, by block: the layers that it chose, and the speed."""
    rows = data("step-auto.json")["rows"]
    plain = {(row["shape"], row["way"]): row["seconds"] for row in rows if row["contender"] == "bf16"}
    of = {(row["shape"], row["way"]): row for row in rows if row["contender"] != "bf16"}
    ways = tuple(dict.fromkeys(way for _, way in of))

    def line(name: str) -> tuple[str, ...]:
        speeds = [text(plain[name, way] / of[name, way]["seconds"], 3) for way in ways]
        return name, str(of[name, ways[0]]["converted"]), *speeds

    names = dict.fromkeys(name for name, _ in of)
    return table(("model", "converted layers", *(f"{way}: over bf16" for way in ways)), map(line, names))


def start() -> str:
    """What the first step of a process spends its time in, of the parts that take a second in any start."""
    found: dict[str, dict[str, float]] = {}
    for row in data("start.json")["rows"]:
        found.setdefault(row["part"], {})[row["start"]] = row["seconds"]
    whole = found.pop("all")
    listed = {part: of for part, of in found.items() if max(of.values()) >= 1 or part == OWN}
    rest = {name: seconds - sum(of.get(name, 0.0) for of in listed.values()) for name, seconds in whole.items()}
    lines = [
        (f"`{part.strip('<>')}`" if "<" in part else part, *(text(of.get(name, 0.0), 1) for name in whole))
        for part, of in {"all": whole, **listed, "the rest": rest}.items()
    ]
    return table(("seconds in", *whole), lines)


TABLES: Mapping[str, Callable[[], str]] = {
    "calls": calls,
    "steps": steps,
    "chosen steps": chosen_steps,
    "limits": limits,
    "mixture limits": mixture_limits,
    "mixture kernels on an H100": mixture_kernels,
    "power": power,
    "start": start,
    "untuned": untuned,
}
"""The function that makes each table, by the name of its block."""
