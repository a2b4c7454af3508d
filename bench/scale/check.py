"""Predicted over measured: blocks on one GPU, steps and bytes on two and four, published speeds."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.distributed.models import BASELINE, GATHER, TP_WAYS
from bench.scale import compute, traffic
from bench.scale.network import Group, Network
from bench.scale.sources import PUBLISHED
from bench.scale.step import MODELS, RECIPES, Layout, predict
from bench.scale.traffic import FSDP, TP

BAND = (0.9, 1.1)
TP_FOLDER, EXPERTS_FILE = "8b-slice-tp2-dp1", "experts-over-ranks-deepseek-v3"
# Where the model is known to miss, by the name of the comparison, with the reason.
# torchtitan's models here, and its sequences of a rank and their tokens.
WHOLE = {"8b": ("llama3-8b", 1, 8192), "30b-a3b": ("qwen3-30b-a3b", 2, 4096)}
LAYERS_MODEL = "qwen3-30b-a3b"
WARM = "its GEMMs are faster in the step than in their own benchmark, which empties L2 first"
OUTSIDE = {
    "kernels of hidden 2048 layers, tensorwise": WARM,
    "kernels of hidden 2048 layers, blockwise": WARM,
    "step of 1b on 2, rowwise, FP8 all-gather": "a slow run: on four GPUs the same step takes 0.93 of this time",
    "experts, EP = 2, rowwise from values, sends codes": "codes save bytes but no time: the work on them is left out",
    "torchtitan's 8b, TP = 2, 20 steps, rowwise": "the GPU waits for the host: docs/torchtitan.md",
    "speed over bf16, 8 layers of qwen3-30b-a3b on 2, EP = 2, rowwise from values, sends codes": (
        "the GPU waits for the counts of each layer, and for a loss that is not compiled: docs/experts.md"
    ),
    "step of 8b-slice, TP = 2, rowwise": "not explained: the same recipe from codes takes 0.77 of this time",
}


class Compared(NamedTuple):
    """A prediction and what was measured, in the same unit, and the file or page of the measurement."""

    what: str
    predicted: float
    measured: float
    source: str

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured

    @property
    def holds(self) -> bool:
        """Whether the ratio is inside of :data:`BAND`."""
        return BAND[0] <= self.ratio <= BAND[1]


def _data(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((compute.MEASURED / folder / "distributed.json").read_text())
    return found


def kernels() -> Iterator[Compared]:
    """Kernels of the blocks of measured models; the rates of attention and casts come from the same file."""
    for recipe in RECIPES:
        for each in compute.measured_layers(recipe):
            seconds = sum(compute.kernel_seconds(each.block, recipe, each.sequence, each.head_dim))
            what = f"kernels of {each.name}, {recipe}"
            yield Compared(what, each.layers * seconds, each.seconds["seconds"], "model.json")


def _layout(contender: str, ranks: int) -> tuple[str, Layout] | None:
    recipe, _, way = contender.partition(", ")
    if recipe not in RECIPES or way not in ("", GATHER):
        return None
    return recipe, Layout(ranks, gather=way == GATHER)


def steps() -> Iterator[Compared]:
    """Steps under FSDP2, of each run of ``bench.distributed`` with a known model; no prediction reads these runs."""
    for path in sorted(compute.MEASURED.glob("distributed-*-x*/distributed.json")):
        settings = (found := _data(path.parent.name))["settings"]
        name, ranks = Path(settings["model"]).stem, settings["dp"]
        for row in found["rows"]:
            chosen = _layout(row["contender"], ranks)
            if chosen is not None and name in MODELS and row["seconds"] is not None:
                seconds = predict(name, *chosen, settings["batch_size"], settings["seq_len"], Network())["seconds"]
                what = f"step of {name} on {ranks}, {row['contender']}"
                yield Compared(what, seconds, row["seconds"], path.parent.name)


def nvlink_of_two() -> float:
    """Bytes a second of NVLink, from the collectives of a step in bf16 on two GPUs with tensor parallelism."""
    (row,) = (row for row in _data(f"distributed-{TP_FOLDER}")["rows"] if row["contender"] == f"{BASELINE}, {TP}")
    kernels = json.loads((compute.MEASURED / "kernels-8b-slice-tp2.json").read_text())["rows"]
    (seconds,) = (each["collective_seconds"] for each in kernels if each["contender"] == f"{BASELINE}, {TP}")
    # Each of two ranks sends half of what it gathers or scatters.
    return sum(row["bytes"][kind] for kind in ("all_gather", "reduce_scatter")) / 2 / seconds


def tensor_parallel() -> Iterator[Compared]:
    """Steps of two GPUs with tensor parallelism, over the bandwidth that bf16's collectives had."""
    folder = f"distributed-{TP_FOLDER}"
    found, network = _data(folder), Network(nvlink=nvlink_of_two())
    batch, sequence = (found["settings"][name] for name in ("batch_size", "seq_len"))
    measured = {row["contender"]: row["seconds"] for row in found["rows"]}
    ways = {name: f"{name}, {TP_WAYS[-1]}" for name in ("rowwise", "rowwise_codes", "blockwise_codes")}
    ways = {"bf16": f"{BASELINE}, {TP}", **ways}
    for name, contender in ways.items():
        seconds = predict("8b-slice", name.removesuffix("_codes"), Layout(2, tp=2), batch, sequence, network)["seconds"]
        yield Compared(f"step of 8b-slice, TP = 2, {name}", seconds, measured[contender], folder)


def expert_parallel() -> Iterator[Compared]:
    """A layer of experts over two GPUs: its seconds on one, and its all-to-alls over the bandwidth of two."""
    found = json.loads((compute.MEASURED / f"{EXPERTS_FILE}.json").read_text())
    network, tokens = Network(nvlink=nvlink_of_two()), found["size"][0]
    for row in found["rows"]:
        recipe, _, payload = row["contestant"].partition(" from values, sends ")
        if recipe in RECIPES and (payload or recipe == BASELINE):
            sent = network.seconds("all_to_all", row["all_to_all_bytes"] / 4, Group(found["ranks"], found["ranks"]))
            seconds = sum(compute.experts_seconds("deepseek-v3", recipe, tokens)) + 4 * sent
            yield Compared(f"experts, EP = 2, {row['contestant']}", seconds, row["seconds"], EXPERTS_FILE)


def _whole_layout(row: dict[str, Any]) -> tuple[str, Layout]:
    """The name of a row's layout, with the number of GPUs where they are more than two, and the layout."""
    ranks, tp, ep = row["processes"], row["tp"], row["ep"]
    gather = row["contender"] != BASELINE and row["gather"] and ranks > tp
    names = [f"TP = {tp}"] * (tp > 1) + ["FSDP2"] * (ranks > tp) + [f"EP = {ep}"] * (ep > 1)
    saved = {"full": " with full checkpointing", "none": " without checkpointing"}.get(row["checkpointing"], "")
    name = " x ".join(names) + saved + (" as CUDA graph" if row.get("graphs") else "")
    wide = "" if row["gather"] or row["contender"] == BASELINE else ", bf16 gather"
    return f"{name}{wide}{f', {ranks} GPUs' if ranks > 2 else ''}", Layout(ranks, tp, ep, gather=gather)


def whole_models() -> Iterator[Compared]:
    """Whole models by torchtitan's Trainer; the predictions are older than the runs."""
    for path in sorted(compute.MEASURED.glob("torchtitan-*-*.json")):
        for row in json.loads(path.read_text())["rows"]:
            recipe, of = row.get("contender"), WHOLE.get(row.get("model", ""))
            if recipe not in RECIPES or of is None or row["layers"] or row.get("deterministic"):
                continue
            name, layout = _whole_layout(row)
            if layout.tp > 1 and MODELS[of[0]].experts:
                continue
            batch, tokens = row["batch"] or of[1], row["length"] or of[2]
            found = predict(of[0], recipe, layout, batch, tokens, Network(), row["checkpointing"])
            name += f" of {batch} sequences" if row["batch"] else ""
            what = f"torchtitan's {row['model']}, {name}, {row['steps']} steps, {recipe}"
            yield Compared(what, found["seconds"], batch * tokens / row["tokens_per_second"] / row["tp"], path.name)


def expert_layers() -> Iterator[Compared]:
    """Compiled layers of a mixture, whose rows travel in 8 bits where weights do: their speed over bf16.

    Their loss is torch's, in float32 and not compiled, which the model of whole steps does not have.
    """
    for path in sorted(compute.MEASURED.glob(f"experts-over-ranks-{LAYERS_MODEL}-*-layers*.json")):
        settings, ranks = (found := json.loads(path.read_text()))["settings"], found["ranks"]
        layout = Layout(ranks, ep=settings.get("ep") or ranks, gather=settings.get("gather", False))
        sizes = settings["batch_size"], settings["seq_len"], Network()
        plain, *rows = [row for row in found["rows"] if row["seconds"] is not None and settings["tp"] == 1]
        for row in rows if settings["compile"] else ():
            recipe, _, sent = row["contender"].partition(" from values, sends ")
            if recipe in RECIPES and layout.gather == (sent == "codes"):
                wide = dataclasses.replace(layout, gather=False)
                seconds = [
                    predict(LAYERS_MODEL, each, way, *sizes, layers=settings["layers"])["seconds"]
                    for each, way in ((BASELINE, wide), (recipe, layout))
                ]
                what = f"speed over bf16, {settings['layers']} layers of {LAYERS_MODEL} on {ranks}, EP = {layout.ep}, "
                measured = plain["seconds"] / row["seconds"]
                yield Compared(what + row["contender"], seconds[0] / seconds[1], measured, path.name)


def _root_bytes(name: str, head: int) -> int:
    """Bytes of embedding and norm in bf16, and of the last layer with ``head`` bytes an element, in two gathers."""
    model = MODELS[name]
    table = model.vocabulary * model.hidden
    return 2 * (compute.HIGH * (table + model.hidden) + head * table)


def gathered() -> Iterator[Compared]:
    """Bytes of a step's gathers and reduce-scatters on two and on four GPUs: equal, or the model is wrong."""
    for ranks in (2, 4):
        folder = f"distributed-1b-x{ranks}"
        for row in _data(folder)["rows"]:
            if (chosen := _layout(row["contender"], ranks)) is None:
                continue
            recipe, layout = chosen
            found = traffic.of_block(MODELS["1b"].block(1), FSDP, recipe if layout.gather else "bf16").bytes
            # `bench.distributed` converts the last layer, too.
            heads = {"all_gather": compute.CODE if layout.gather else compute.HIGH, "reduce_scatter": compute.HIGH}
            for kind, head in heads.items():
                size = round(MODELS["1b"].layers * found[kind]) + _root_bytes("1b", head)
                yield Compared(f"{kind} bytes of 1b on {ranks}, {row['contender']}", size, row["bytes"][kind], folder)


def scattered() -> Iterator[Compared]:
    """Bytes of the reduce-scatters of four blocks and the embedding with tensor parallelism: equal, too."""
    folder = f"distributed-{TP_FOLDER}"
    model, found = MODELS["8b-slice"], _data(folder)
    tokens = found["settings"]["batch_size"] * found["settings"]["seq_len"]
    size = traffic.of_block(model.block(tokens), TP, "bf16").bytes["reduce_scatter"]
    # Of the embedding's output, and of the gradient of the last layer's input.
    around = 2 * tokens * model.hidden * compute.HIGH
    for row in found["rows"]:
        predicted = round(model.layers * size) + around
        yield Compared(f"reduce_scatter bytes, {row['contender']}", predicted, row["bytes"]["reduce_scatter"], folder)


def published() -> list[dict[str, Any]]:
    """Our predictions for an H200 beside what others measured with other software, in tokens a second and GPU."""
    rows = []
    for each in PUBLISHED:
        layout = Layout(each.gpus, tp=each.tp, gather=each.gather)
        found = predict(each.model, each.recipe, layout, each.batch, each.sequence, Network(), each.recompute)
        rows.append({**each._asdict(), "predicted": found["tokens_a_second_a_gpu"], "parts": found["parts"]})
    return rows


def all_compared() -> list[Compared]:
    """Every comparison with what this repository measured on GPUs."""
    kinds = (kernels, steps, tensor_parallel, expert_parallel, whole_models, expert_layers, gathered, scattered)
    return [each for of in kinds for each in of()]
