"""The tables of README.md and docs/benchmarks.md, and README's figure, from the data in bench/results."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.contest.cases import IN_GRAPH, MODEL, MODEL_GRAPH
from bench.shapes import ALL_MODELS, select
from bench.tables import over_peer, table, with_peers

Row = Mapping[str, Any]
DATA = Path(__file__).resolve().parents[2] / "bench" / "results" / "nvidia-h200"
LARGE = ("square", "llama-8b", "llama-70b", "deepseek-v3")
SMALL_M = ("decode",)
# Contenders in the tables of layers and models: their order, and their names in a table.
CONTENDERS = {
    "rowwise precise": "rowwise",
    "rowwise fast": "rowwise, fast accumulation",
    "tensorwise precise": "tensorwise",
    "blockwise precise": "blockwise",
    "torchao rowwise": "torchao rowwise",
    "torchao tensorwise": "torchao tensorwise",
}
GEMMS = {
    ("rowwise", "tritonfp8 precise"): "rowwise, precise",
    ("rowwise", "tritonfp8 fast"): "rowwise, fast",
    ("tensorwise", "tritonfp8 precise"): "tensorwise, precise",
    ("tensorwise", "tritonfp8 fast"): "tensorwise, fast",
    ("blockwise", "tritonfp8 precise"): "blockwise (1x128 by 128x128)",
    ("blockwise grad_weight", "tritonfp8 precise"): "blockwise grad_weight (1x128 by 1x128)",
}
CASTS = (
    "rowwise", "tensorwise", "1x128", "128x128", "1x32", "rowwise both", "1x128 both",
)  # fmt: skip
CAST_WIDTHS = (2048, 4096, 14336)
CAST_ROWS = 16384
ALIKE = "copy of as many bytes"
EPILOGUE = "rowwise epilogue"


def data(name: str) -> dict[str, Any]:
    """Load one JSON file of results."""
    found: dict[str, Any] = json.loads((DATA / name).read_text())
    return found


def ratios(rows: Iterable[Row]) -> Iterator[tuple[Row, float]]:
    """Each row that has a peer, with its speed over the peer."""
    for row, peer in with_peers(rows):
        if (ratio := over_peer(row, peer)) is not None:
            yield row, ratio


def _mean(name: str, case: str, contender: str, sets: Sequence[str]) -> float | None:
    """Geometric mean of the speeds over the peer, over sets of shapes."""
    found = [
        ratio
        for row, ratio in ratios(data(f"{name}.json")["rows"])
        if (row["case"], row["contender"]) == (case, contender) and row["set"] in sets
    ]
    return statistics.geometric_mean(found) if found else None


def text(value: float | None, digits: int = 2) -> str:
    """A figure with that many digits; empty if it was not measured."""
    return "" if value is None else f"{value:.{digits}f}"


def _command(name: str) -> str:
    return f"`{data(name)['command']}`"


def gemms() -> str:
    """Speed of GEMMs over torch's own."""
    rates = {
        (row["case"], row["contender"]): row["flops"] / row["seconds"] / 1e12
        for row in data("scaled_matmul.json")["rows"]
        if row["set"] == "square" and row["seconds"]
    }
    lines = [
        (
            name,
            f"{rates[key]:.0f}",
            *(text(_mean("scaled_matmul", *key, sets), 3) for sets in (LARGE, SMALL_M)),
        )
        for key, name in GEMMS.items()
    ]
    lines += [
        (
            f"rowwise, precise, with {epilogue}, over one without",
            "",
            text(_mean("scaled_matmul", EPILOGUE, epilogue, LARGE), 3),
            "",
        )
        for epilogue in ("bias", "bias, silu")
    ]
    return table(("GEMM", "TFLOP/s at 8192^3", "over torch, large", "over torch, M of 1 to 256"), lines)


def casts() -> str:
    """Bytes per second of casts over a copy's, for as many bytes (at most 1 GiB)."""
    speeds = {
        (row["case"], tuple(row["shape"]), row["contender"]): row["bytes"] / row["seconds"]
        for row in data("quantize.json")["rows"]
        if row["seconds"] and "bytes" in row
    }

    def cell(case: str, width: int) -> str:
        ours, copy = (speeds.get((case, (CAST_ROWS, width), contender)) for contender in ("tritonfp8", ALIKE))
        return text(ours / copy if ours and copy else None)

    header = ("cast", *(f"{CAST_ROWS} x {width}" for width in CAST_WIDTHS))
    return table(header, [(case, *(cell(case, width) for width in CAST_WIDTHS)) for case in CASTS])


def speed_ups(name: str, case: str, contenders: Iterable[str] = CONTENDERS) -> dict[str, dict[tuple[int, ...], float]]:
    """Speed over bf16 in one suite, by contender and shape."""
    found: dict[str, dict[tuple[int, ...], float]] = {contender: {} for contender in contenders}
    for row, ratio in ratios(data(f"{name}.json")["rows"]):
        if row["case"] == case and row["contender"] in found:
            found[row["contender"]][tuple(row["shape"])] = ratio
    return found


LAYER_SHAPES = ((16384, 4096, 14336), (16384, 4096, 4096), (4096, 4096, 14336), (16384, 2048, 2048))
MODELS = {
    "four Llama 8B layers": (4, 4096, 14336, 32, 8, 4, 4096),
    "four layers of hidden size 2048": (4, 2048, 8192, 32, 8, 2, 4096),
}
# Cases and shapes.
VISION = {
    "six ViT-H layers, 64 images of 197 tokens": (MODEL.name, (6, 1280, 5120, 16, 16, 64, 197)),
    "four layers of hidden size 1024, 16384 tokens": (MODEL.name, (4, 1024, 4096, 16, 16, 4, 4096)),
    "the same, both as CUDA graphs": (MODEL_GRAPH.name, (4, 1024, 4096, 16, 16, 4, 4096)),
}
MIXTURES = {"mixtral": "Mixtral", "qwen3-30b": "Qwen3-30B-A3B", "deepseek-v3": "DeepSeek-V3"}


def layers() -> str:
    """Speed of linear layers and models over bf16."""
    contenders = {**CONTENDERS, "mxfp8 precise": "mxfp8"}
    of_layers, of_models = (speed_ups(*each, contenders) for each in (("linear", "layer"), ("model", "model")))
    lines = [
        (
            name,
            *(text(of_layers[contender].get(shape)) for shape in LAYER_SHAPES),
            *(text(of_models[contender].get(shape)) for shape in MODELS.values()),
        )
        for contender, name in contenders.items()
    ]
    shapes = (" x ".join(map(str, shape)) for shape in LAYER_SHAPES)
    return table(("recipe", *(f"linear {shape}" for shape in shapes), *MODELS), lines)


def models(folder: str = ".") -> str:
    """Speed of every model over bf16, and the memory of rowwise over torchao's tensorwise."""
    speeds, memory = speed_ups(f"{folder}/model", "model"), peaks(folder)
    lines = []
    for name, shape in {shape.name: shape.size for shape in select("model", ALL_MODELS)}.items():
        share = memory["rowwise precise", shape] / memory["torchao tensorwise", shape]
        lines.append((name, *(text(speeds[contender].get(shape)) for contender in CONTENDERS), text(share, 3)))
    return table(("layers of", *CONTENDERS.values(), "memory: rowwise over torchao tensorwise"), lines)


def vision() -> str:
    """Speed over bf16 of the layers that are as wide as vision transformers."""
    recipes = {contender: name for contender, name in CONTENDERS.items() if not name.startswith("torchao")}
    of_cases = {case: speed_ups("model", case) for case, _ in VISION.values()}
    lines = [
        (name, *(text(of_cases[case][contender].get(shape)) for contender in recipes))
        for name, (case, shape) in VISION.items()
    ]
    return table(("speed of a compiled training step over bf16, one H200", *recipes.values()), lines)


def peaks(folder: str = ".") -> dict[tuple[str, tuple[int, ...]], int]:
    """Peak memory of models in bytes, by contender and shape."""
    rows = [row for row in data(f"{folder}/model.json")["rows"] if row["case"] == MODEL.name and row["seconds"]]
    return {(row["contender"], tuple(row["shape"])): row["peak_bytes"] for row in rows}


def memory() -> str:
    """Peak memory of models over bf16's."""
    found = peaks()
    lines = [
        (name, *(text(found[contender, shape] / found["bf16", shape]) for shape in MODELS.values()))
        for contender, name in CONTENDERS.items()
    ]
    return table(("recipe", *MODELS), lines)


def gathered_bytes() -> str:
    """Bytes of the FP8 all-gather over the bf16 all-gather's, by recipe."""
    rows = {row["contender"]: row for row in data("distributed-160m-x4-losses/distributed.json")["rows"]}
    sent = {name: row["bytes"]["all_gather"] for name, row in rows.items()}
    with_gather = [name for name in sent if name.endswith(", FP8 all-gather") and rows[name]["own"]]
    lines = [(name.partition(",")[0], text(sent[name] / sent["bf16"], 3)) for name in with_gather]
    return table(("recipe", "bytes of all-gathers over bf16's"), lines)


def accumulation() -> str:
    """SQNR of fast and precise accumulation."""
    return table(
        ("K", "data", "precise", "fast"),
        [
            (str(row["k"]), row["data"], f"{row['precise']:.1f} dB", f"{row['fast']:.1f} dB")
            for row in data("accumulation.json")["rows"]
        ],
    )


def host_times() -> str:
    """Host time of eager calls: our public functions, our ops, and torch."""
    found: dict[str, dict[str, float]] = {}
    for row in data("launch.json")["rows"]:
        # The other case has no peer: ops in a compiled graph.
        if row["set"] == "launch" and row["case"] != IN_GRAPH.name:
            found.setdefault(row["case"], {})[row["contender"]] = 1e6 * row["seconds"]
    names = ("tritonfp8", "tritonfp8 op", "torch._scaled_mm")
    lines = [(case, *(f"{times[name]:.1f} us" for name in names)) for case, times in found.items()]
    return table(("call, [128, 768, 768]", "function", "op", "torch._scaled_mm"), lines)


def gathers() -> str:
    """FSDP2 with and without the FP8 all-gather, on two and four GPUs."""
    runs = [data(f"distributed-1b-x{world}/distributed.json")["rows"] for world in (2, 4)]
    bf16 = [next(row for row in rows if row["contender"] == "bf16") for rows in runs]

    def line(contender: str) -> tuple[str, ...]:
        found = [next((row for row in rows if row["contender"] == contender), None) for rows in runs]
        steps = [f"{1e3 * row['seconds']:.0f} ms" if row and row["seconds"] else "" for row in found]
        share = found[0]["bytes"]["all_gather"] / bf16[0]["bytes"]["all_gather"] if found[0] else None
        return contender, *steps, text(share, 3)

    names = [row["contender"] for row in runs[0]]
    return table(("contestant", "step, two GPUs", "four GPUs", "bytes of all-gathers over bf16's"), map(line, names))


RUNS_OF_TP = {
    "two ranks": "tp2-dp1-losses",
    "two, eager": "tp2-dp1-losses-eager",
    "two by two of FSDP2": "tp2-dp2-losses",
    "two, learning rate 3e-5": "tp2-dp1-losses-lr3e-05",
}
AFTER = "difference from the loss of one process after 10 steps"
LARGEST = "largest difference from the losses of one process"


def tensor_parallelism() -> str:
    """Losses under tensor parallelism against losses of one process."""
    bars = {
        name: {bar["what"]: bar.get("measured") for bar in data(f"distributed-160m-{run}/distributed.json")["bars"]}
        for name, run in RUNS_OF_TP.items()
    }
    wanted = {
        recipe: f"{recipe}, TP: {AFTER}"
        for recipe in ("tensorwise", "rowwise", "rowwise_hp_grad_weight", "blockwise", "mxfp8")
    }
    wanted |= {
        "largest in ten steps: bf16": f"control: bf16, TP: {LARGEST}, 10 steps",
        **{
            f"largest in ten steps: {recipe}, one process that adds in another order": (
                f"control: {recipe}, one process, another order of sums: {LARGEST}, 10 steps"
            )
            for recipe in ("bf16", "tensorwise", "rowwise")
        },
    }
    lines = [(name, *(text(found.get(what), 4) for found in bars.values())) for name, what in wanted.items()]
    return table(("recipe", *RUNS_OF_TP), lines)


def _ratio(name: str, case: str, contender: str, shape: Sequence[int]) -> float | None:
    wanted = (case, contender, tuple(shape))
    rows = ratios(data(f"{name}.json")["rows"])
    return next((ratio for row, ratio in rows if (row["case"], row["contender"], tuple(row["shape"])) == wanted), None)


def headline() -> str:
    """The README's table: three results, each with its command."""
    gather = data("distributed-1b-x2/distributed.json")
    sent = {row["contender"]: row["bytes"]["all_gather"] for row in gather["rows"]}
    share = sent["rowwise, FP8 all-gather"] / sent["bf16"]
    torchao_share = sent["torchao tensorwise, FP8 all-gather"] / sent["bf16"]

    def over_bf16(file: str) -> dict[str, float]:
        found = {row["contender"]: row["tokens_per_second"] for row in data(file)["rows"]}
        return {name: speed / found["bf16"] for name, speed in found.items()}

    client, titan = over_bf16("client-regions.json"), over_bf16("torchtitan-8b-fsdp.json")
    best = max(ratio for name, ratio in titan.items() if name.startswith("torchao"))
    lines = [
        (
            "tokens a second of Llama-3-8B in Hugging Face's Trainer over bf16, compiled, with checkpointing",
            f"rowwise {text(client['rowwise'])}, head in FP8 {text(client['rowwise with head'])}",
            f"rowwise {text(client['torchao rowwise'])}",
            _command("client-regions.json"),
        ),
        (
            "tokens a second of Llama-3-8B in torchtitan over bf16, FSDP2",
            f"rowwise {text(titan['rowwise'])}",
            f"rowwise {text(titan['torchao rowwise'])}, its best {text(best)}",
            _command("torchtitan-8b-fsdp.json"),
        ),
        (
            "bytes of FSDP2's all-gathers over bf16's, losses equal to the bit",
            f"rowwise {text(share, 3)}",
            f"tensorwise {text(torchao_share, 3)}",
            _command("distributed-1b-x2/distributed.json"),
        ),
    ]
    return table(("measured on one H200 (torchtitan and the gather on two)", "tritonfp8", "torchao", "command"), lines)


def picture() -> Any:
    """Bar chart of model speeds over bf16, ours and torchao's."""
    from matplotlib.figure import Figure

    found = speed_ups("model", "model")
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots(1, len(MODELS), sharex=True, sharey=True)
    for axis, (model, shape) in zip(axes, MODELS.items(), strict=True):
        bars = [(name.replace("`", ""), found[contender][shape]) for contender, name in CONTENDERS.items()][::-1]
        colors = ["tab:gray" if name.startswith("torchao") else "tab:green" for name, _ in bars]
        axis.barh([name for name, _ in bars], [ratio for _, ratio in bars], color=colors)
        for place, (_, ratio) in enumerate(bars):
            # To the right of the line for bf16, which would go through the figure of a slower bar.
            axis.text(max(ratio, 1) + 0.03, place, f"{ratio:.2f}", va="center", fontsize=8)
        axis.axvline(1, color="black", linestyle="--", linewidth=1)
        axis.set_title(model, fontsize=10)
        axis.set_xlim(0, 1.75)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("speed of a training step over bf16 (dashed), compiled, one H200", fontsize=9)
    return figure


TABLES: Mapping[str, Callable[[], str]] = {
    "accumulation": accumulation,
    "casts": casts,
    "gathered bytes": gathered_bytes,
    "gathers": gathers,
    "gemms": gemms,
    "headline": headline,
    "host times": host_times,
    "layers": layers,
    "memory": memory,
    "models": models,
    "models on an H100": lambda: models("../nvidia-h100"),
    "tensor parallelism": tensor_parallelism,
    "vision": vision,
}
"""The function that makes each table, by the name of its block."""
