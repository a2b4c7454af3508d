"""The tables of training runs, compiled steps and decoding, from the data in bench/results/."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping

from bench.contest.bars import GROUPED_BARS
from bench.contest.grouped import EXPERTS
from bench.contest.judge import judge
from bench.health import EVERY, cost
from bench.inference.decode import PLAIN
from bench.tables import bars_table, table
from docs.measured.results import DATA, MIXTURES, data, text


def training(folder: str = "train-160m") -> str:
    """The table written by `tritonfp8 train`."""
    lines = (DATA / folder / "table.md").read_text().splitlines()
    return "\n".join(line for line in lines if line.startswith("|")) + "\n"


def mixtures(path: str) -> str:
    """The bars of experts that a file of data has rows for."""
    rows = data(path)["rows"]
    return bars_table(verdict for verdict in judge(rows, GROUPED_BARS) if verdict.measured is not None)


def mixture_recipes() -> str:
    """Speed and memory of layers of experts over torch's bf16 on an H100, by recipe."""
    rows = data("../nvidia-h100/experts.json")["rows"]
    found = {(row["set"], row["contender"]): row for row in rows if row["case"] == EXPERTS.name}

    def cell(shape: str, contender: str) -> str:
        row, peer = found[shape, contender], found[shape, "torch bf16"]
        speed, memory = peer["seconds"] / row["seconds"], row["peak_bytes"] / peer["peak_bytes"]
        return f"{text(speed)}, memory {text(memory)}"

    contenders = dict.fromkeys(row["contender"] for row in found.values() if row["own"])
    lines = [(contender, *(cell(shape, contender) for shape in MIXTURES)) for contender in contenders]
    return table(("experts by", *MIXTURES.values()), lines)


def schedule() -> str:
    """A schedule of bf16, FP8 and bf16 against an all-bf16 run."""
    found = data("schedule-160m/schedule.json")["found"]
    answers = {True: "yes", False: "no"}
    return table(
        ("question", "found"),
        [
            ("loss of the last 50 steps, over an all-bf16 run's", f"{100 * found['difference']:+.2f} %"),
            ("graphs compiled after the switch back to bf16", str(found["graphs_after_second_switch"])),
            ("first stage equal to the all-bf16 run, to the bit", answers[found["first_stage_equal_to_the_bit"]]),
            ("run resumed in the middle ends with the same bits", answers[found["resumed_equal_to_the_bit"]]),
        ],
    )


def seeds() -> str:
    """Each recipe's loss over the bf16 loss from the same seed."""
    measured = data("seeds-160m/seeds.json")
    found = {(row["recipe"], row["seed"]): row["difference"] for row in measured["found"]}
    recipes, numbers = sorted({recipe for recipe, _ in found}), sorted({seed for _, seed in found})
    lines = [(recipe, *(f"{100 * found[recipe, seed]:+.2f} %" for seed in numbers)) for recipe in recipes]
    return table(("recipe", *(f"seed {seed}" for seed in numbers)), lines)


def other_text() -> str:
    """The same for runs that read no text twice, with the loss on text that was held out."""
    lines = []
    for row in data("seeds-160m-other-text/seeds.json")["found"]:
        lines.append(
            (row["recipe"], str(row["seed"]), *(f"{100 * row[name]:+.2f} %" for name in ("difference", "held_out")))
        )
    return table(("recipe", "seed", "last 300 steps", "held-out text"), lines)


def direct_calls() -> str:
    """Speed of compiled models over bf16, with ops called directly and through the dispatcher."""
    rows = [row for row in data("direct_calls.json")["rows"] if "shape" in row]
    bf16 = {row["shape"]: row["seconds"] for row in rows if row["contender"] == "bf16"}
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row["contender"] != "bf16":
            found.setdefault((row["shape"], row["contender"]), {})[row["calls"]] = bf16[row["shape"]] / row["seconds"]
    lines = [(*key, *(text(speeds.get(way)) for way in ("dispatcher", "direct"))) for key, speeds in found.items()]
    return table(("layers of", "recipe", "through the dispatcher", "directly"), lines)


def direct_call_times() -> str:
    """Host time of one op in a compiled graph."""
    found: dict[str, dict[str, float]] = {}
    for row in data("direct_calls.json")["rows"]:
        if "op" in row:
            found.setdefault(row["op"], {})[row["calls"]] = 1e6 * row["host_seconds"]
    lines = [(op, *(f"{times[way]:.1f} us" for way in ("dispatcher", "direct"))) for op, times in found.items()]
    return table(("op, [128, 768, 768]", "through the dispatcher", "directly"), lines)


def monitoring() -> str:
    """What a sample of ``monitor`` every 50 steps adds to a step, by the rows that it measures."""
    rows = data("../nvidia-h100/health.json")["rows"]
    counts = sorted(int(kind.split()[1]) for kind in rows[0]["seconds"] if kind.startswith("sampled "))
    lines = []
    for row in rows:
        costs = (f"{100 * cost(row['seconds'], count):.1f} %" for count in counts)
        lines.append((row["shape"], f"{1e3 * row['seconds']['plain'] / EVERY:.0f} ms", *costs))
    return table(("model", "step", *(f"`rows={count}`" for count in counts)), lines)


def torchtitan_mixture() -> str:
    """The largest differences between losses of torchtitan's mixture, also where only noise makes them."""
    compared = {
        "tp": "two processes of tensor parallelism, and one",
        "noise": "one process, and one whose first weights differ by 1e-7 of their values",
        "gather": "FSDP2 over two processes, with the 8-bit gather and without",
    }
    rows = data("../cpu/torchtitan-moe/torchtitan.json")["rows"]
    lines = [(row["recipe"], compared[row["compared"]], f"{row['difference']:.1e}") for row in rows]
    return table(("recipe", "compared", "largest difference in ten steps"), lines)


def decoding(*names: str) -> str:
    """Speed and memory of stored weights over bf16, by tokens decoded together. Later files replace rows."""
    files = (data(name)["rows"] for name in names)
    rows = [row for row in itertools.chain.from_iterable(files) if row["recipe"] != PLAIN]
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    counts = sorted({row["tokens"] for row in rows})
    speeds = {(row["recipe"], row["tokens"]): row["speed_over_bf16"] for row in rows}
    memory = {row["recipe"]: row["bytes_of_bf16"] for row in rows}
    lines = [(name, f"{memory[name]:.3f}", *(f"{speeds[name, n]:.2f}" for n in counts)) for name in recipes]
    return table(("recipe", "bytes of the weights", *(f"{n} token{'s' * (n > 1)}" for n in counts)), lines)


def stored_steps() -> str:
    """Speed of the fused AdamW over a copy of as many bytes, by the dtype of its moments."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in data("stored-training-speed.json")["rows"]:
        shape = " x ".join(map(str, row["shape"]))
        found.setdefault((shape, row["recipe"]), {})[row["moments"]] = row["share"]
    moments = list(next(iter(found.values())))
    lines = [(*key, *(f"{shares[dtype]:.2f}" for dtype in moments)) for key, shares in found.items()]
    return table(("weight", "recipe", *(f"{dtype} moments" for dtype in moments)), lines)


def stored_losses() -> str:
    """Losses without float32 masters beside those with them."""
    rows = data("stored-training-160m-rowwise.json")["rows"]
    base = rows[0]["last"]
    lines = [
        (row["contestant"], row["moments"], f"{row['last']:.4f}", f"{100 * (row['last'] / base - 1):+.2f} %",
         f"{row['bytes']['linear']:.2f}")
        for row in rows
    ]  # fmt: skip
    return table(
        ("weights, rounded", "moments", "loss of the last 50 steps", "over masters", "bytes a parameter"), lines
    )


def stored_sharded() -> str:
    """Step, memory and gathered bytes (over bf16's) of stored weights under FSDP2, beside other contestants."""
    rows = data("../nvidia-h100/distributed-1b-x2-stored/distributed.json")["rows"]
    base = rows[0]
    lines = [
        (row["contender"], f"{1e3 * row['seconds']:.1f} ms", f"{base['seconds'] / row['seconds']:.3f}",
         f"{row['peak_bytes'] / 2**30:.2f} GiB", f"{row['bytes']['all_gather'] / base['bytes']['all_gather']:.3f}",
         f"{row['bytes_a_linear_parameter']:.2f}")
        for row in rows
    ]  # fmt: skip
    heads = (
        "weights",
        "step",
        "speed over bf16",
        "peak memory",
        "gathered bytes of bf16's",
        "bytes a linear parameter",
    )
    return table(heads, lines)


TABLES: Mapping[str, Callable[[], str]] = {
    # The kernel of mxfp8 and batch-invariant layers are newer than the first run.
    "decoding": lambda: decoding("decode.json", "decode-mxfp8.json", "decode-invariant.json"),
    "decoding experts": lambda: decoding("decode-qwen3-moe.json"),
    "direct call times": direct_call_times,
    "direct calls": direct_calls,
    "monitoring": monitoring,
    "mixtures": functools.partial(mixtures, "grouped.json"),
    "mixture layers": functools.partial(mixtures, "experts.json"),
    "mixture layers on an H100": functools.partial(mixtures, "../nvidia-h100/experts.json"),
    "mixture recipes on an H100": mixture_recipes,
    "mixture training": functools.partial(training, "train-160m-moe"),
    "other text": other_text,
    "schedule": schedule,
    "seeds": seeds,
    "stored losses": stored_losses,
    "stored steps": stored_steps,
    "torchtitan mixture": torchtitan_mixture,
    "stored sharded": stored_sharded,
    "training": training,
}
"""The function that makes each table, by the name of its block."""
