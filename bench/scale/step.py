"""Predict a training step: blocks of measured kernels, and the part of their collectives that nothing hides."""

import dataclasses
import functools
import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from bench.scale import compute, traffic
from bench.scale.compute import BF16, RECOMPUTED, TORCH_EXPERTS, Passes
from bench.scale.network import Group, Network
from bench.scale.sources import CONSTANTS
from bench.scale.traffic import FSDP, TP, Block
from tritonfp8.specs.checks import require, require_int
from tritonfp8.training.models import MODELS as PRESETS

RECIPES = (BF16, *traffic.RECIPES)
AMAX = ("model", "layer")
# Backward that computes forward again gathers a third time what two orientations have: docs/distributed.md.
TWO_ORIENTATIONS = ("rowwise",)
# The parts of a step in which a GPU waits for a collective.
EXPOSED = ("layers' collectives", "exposed gathers", "exposed reductions", "amaxes")
# Parameter, gradient and two moments in float32.
STATE_BYTES = 4 * compute.MASTER


class Transformer(NamedTuple):
    """Sizes of a model.

    Attributes:
        layers, hidden, ffn, heads, kv_heads, head_dim, vocabulary: of the model; no ``ffn`` where there are experts.
        experts, top_k, inside: of a mixture: their number, how many a token takes, and hidden features of one.
        measured: the set of ``experts.json`` that has its layer.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    experts: int = 0
    top_k: int = 0
    inside: int = 0
    measured: str = ""

    def block(self, tokens: int) -> Block:
        """A block without its experts."""
        return Block(self.hidden, self.ffn, self.heads * self.head_dim, self.kv_heads * self.head_dim, tokens)

    @property
    def experts_weights(self) -> int:
        """Elements of the experts of a block."""
        return 3 * self.experts * self.inside * self.hidden

    @property
    def parameters(self) -> int:
        """Elements of the weights."""
        return self.layers * (self.block(1).weights + self.experts_weights) + 2 * self.vocabulary * self.hidden


def _preset(name: str) -> Transformer:
    of = PRESETS[name]
    heads = of.num_attention_heads
    return Transformer(
        of.num_hidden_layers, of.hidden_size, of.intermediate_size, heads, of.num_key_value_heads,
        of.hidden_size // heads, traffic.VOCABULARY,
    )  # fmt: skip


# The config.json of each on https://huggingface.co: meta-llama/Meta-Llama-3-8B, -70B, Qwen/Qwen3-30B-A3B.
MODELS = {
    "llama3-8b": Transformer(32, 4096, 14336, 32, 8, 128, 128256),
    "llama3-70b": Transformer(80, 8192, 28672, 64, 8, 128, 128256),
    "qwen3-30b-a3b": Transformer(48, 2048, 0, 32, 4, 128, 151936, 128, 8, 768, "qwen3-30b"),
    "1b": _preset("1b"),
    "8b-slice": _preset("8b-slice"),
}


@dataclass(frozen=True)
class Layout:
    """How a model is spread.

    Attributes:
        gpus: of the cluster.
        tp: ranks that share a layer, with their tokens sharded between layers.
        ep: ranks that share the experts of a layer.
        shard: ranks that share the parameters; None is all of data parallelism, fewer is HSDP.
        gather: whether weights are gathered in 8 bits.
        reshard: whether weights are gathered again in backward.
        amax: one reduction of the amaxes of gathered weights a ``model``, or a ``layer``.
    """

    gpus: int
    tp: int = 1
    ep: int = 1
    shard: int | None = None
    gather: bool = False
    reshard: bool = True
    amax: str = "model"

    def __post_init__(self) -> None:
        for name in ("gpus", "tp", "ep"):
            require_int(name, getattr(self, name), 1)
        require("amax", self.amax, AMAX)
        if self.gpus % self.tp:
            raise ValueError(f"gpus must be a multiple of tp, {self.tp}; got {self.gpus}")
        if self.shard is not None:
            require_int("shard", self.shard, 1)
        if self.data % self.sharded:
            raise ValueError(f"shard must divide the {self.data} data-parallel ranks; got {self.shard}")
        if self.sharded % self.ep:
            raise ValueError(f"ep must divide the {self.sharded} ranks that share parameters; got {self.ep}")

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        return self.gpus // self.tp

    @property
    def sharded(self) -> int:
        """Ranks that share the parameters."""
        return self.shard or self.data

    def check(self, model: Transformer, recipe: str, network: Network) -> None:
        """Raise ValueError if a model or a recipe cannot be spread so."""
        require("recipe", recipe, RECIPES)
        if self.gather and recipe == BF16:
            raise ValueError("bf16 has no 8-bit gather: give a recipe that quantizes, or leave out gather")
        if model.kv_heads % self.tp or self.tp > network.machine:
            most = math.gcd(model.kv_heads, network.machine)
            raise ValueError(f"tp must divide the {model.kv_heads} heads of keys, at most {most}; got {self.tp}")
        if self.ep > 1 and (not model.experts or model.experts % self.ep):
            raise ValueError(f"ep must divide the experts of a mixture, {model.experts}; got {self.ep}")
        if model.experts and self.tp > 1:
            raise ValueError(f"experts are sharded by ep here; got tp={self.tp}")


class Gathers(NamedTuple):
    """Seconds of a block's FSDP2 collectives: a gather, the reduction of its gradients, and bytes of all."""

    gather: float
    reduce: float
    gathered_bytes: float
    reduced_bytes: float


def _gathers(weights: Block | int, layout: Layout, recipe: str, network: Network, shard: int, stride: int) -> Gathers:
    """The collectives of a block, or of that many elements of experts, over ``shard`` ranks."""
    sent = recipe if layout.gather else BF16
    if isinstance(weights, Block):
        found = traffic.of_block(weights, FSDP, sent).bytes
    else:
        # A block that has so many elements more than another has as many bytes more.
        of = [traffic.of_block(Block(128, ffn, 128, 128, 128), FSDP, sent).bytes for ffn in (128, 256)]
        found = {kind: (of[1][kind] - of[0][kind]) * weights / (3 * 128 * 128) for kind in of[0]}
    group = Group.strided(shard, stride, network.machine)
    copies = Group.strided(layout.data // layout.sharded, layout.tp * layout.sharded, network.machine)
    once, reduced = found["all_gather"] / 2, found["reduce_scatter"]
    reduce = network.seconds("reduce_scatter", reduced, group)
    reduce += network.seconds("all_reduce", reduced / shard, copies)
    return Gathers(network.seconds("all_gather", once, group), reduce, once, reduced)


def _tensor_parallel(block: Block, layout: Layout, recipe: str, network: Network) -> float:
    """Seconds of a block's collectives of tensor parallelism, forward and backward."""
    if layout.tp == 1:
        return 0.0
    found, group = traffic.of_block(block, TP, recipe), Group.strided(layout.tp, 1, network.machine)
    return sum(
        calls * network.seconds(kind, found.bytes[kind] / calls, group) for kind, calls in found.calls.items() if calls
    )


@functools.cache
def _sent_bytes(recipe: str, codes: bool) -> float:
    """Bytes of all-to-alls, forward and backward, for an element of the rows of experts: measured on two GPUs."""
    name = BF16 if recipe == BF16 else f"{recipe} from values, sends {'codes' if codes else 'high precision'}"
    file = compute.MEASURED / "experts-over-ranks-deepseek-v3.json"
    found = json.loads(file.read_text())
    sizes = {row["contestant"]: row["all_to_all_bytes"] for row in found["rows"]}
    if name not in sizes:
        raise ValueError(
            f"{file.name} has no {name!r}: measure it with torchrun -m bench.distributed.experts --recipes {recipe}"
        )
    tokens, top_k, _, hidden, _ = found["size"]
    return sizes[name] / (tokens * top_k * hidden)


def _exchanges(model: Transformer, tokens: int, layout: Layout, recipe: str, network: Network) -> float:
    """Seconds of the all-to-alls of a block's experts, two forward and two backward."""
    if layout.ep == 1:
        return 0.0
    size = _sent_bytes(recipe, layout.gather) * tokens * model.top_k * model.hidden / 4
    return 4 * network.seconds("all_to_all", size, Group.strided(layout.ep, 1, network.machine))


def _amaxes(model: Transformer, block: Block, layout: Layout, recipe: str, network: Network) -> float:
    """Seconds of the reductions of the amaxes of gathered weights, which every gather waits for."""
    if not layout.gather:
        return 0.0
    ours, plain = (traffic.of_block(block, FSDP, each).bytes["all_reduce"] for each in (recipe, BF16))
    # The difference to bf16: both reduce the norm of gradients.
    size = round(ours - plain)
    group = Group.strided(layout.sharded, layout.tp, network.machine)
    calls = 1 if layout.amax == "model" else model.layers * len(block.linears)
    return calls * network.seconds("all_reduce", model.layers * size / calls, group)


class _Block(NamedTuple):
    """Seconds of a block: what runs one after the other, and its gathers beside that."""

    passes: Passes
    communication: float
    gathers: Gathers


def _block(
    model: Transformer, tokens: int, recipe: str, layout: Layout, sequence: int, network: Network, recompute: str
) -> _Block:
    whole, stride = model.block(tokens), layout.tp
    shards = layout.sharded if layout.gather else 1
    passes = compute.block_seconds(whole, recipe, sequence, model.head_dim, layout.tp, shards, recompute)
    # Backward sends again what a forward that it computes again sends: half of all.
    sent = _tensor_parallel(whole, layout, recipe, network) * (1.5 if recompute == "full" else 1.0)
    # A rank of tensor parallelism has its part of the weights, and gathers that.
    part = whole._replace(ffn=model.ffn // layout.tp, q=whole.q // layout.tp, kv=whole.kv // layout.tp)
    gathers = _gathers(part, layout, recipe, network, layout.sharded, stride)
    if model.experts:
        contender = TORCH_EXPERTS if recipe == BF16 else recipe
        passes = passes.plus(compute.experts_seconds(model.measured, contender, tokens, recompute))
        sent += _exchanges(model, tokens, layout, recipe, network)
        local = model.experts_weights // layout.ep
        of = _gathers(local, layout, recipe, network, layout.sharded // layout.ep, stride * layout.ep)
        gathers = Gathers(*(x + y for x, y in zip(gathers, of, strict=True)))
    return _Block(passes, sent, gathers)


def _copies(gathers: Gathers, layout: Layout) -> Passes:
    """Seconds in which FSDP2 rounds its shard, copies what it gathered, and copies gradients into what it reduces."""
    # A float32 parameter is read and two bytes are written.
    rounded = (1 + compute.MASTER / compute.HIGH) * gathers.gathered_bytes / layout.sharded
    gathered = (rounded + 2 * gathers.gathered_bytes * (layout.sharded > 1)) / compute.copy_rate()
    reduced = (1 + compute.HIGH / compute.MASTER) * gathers.reduced_bytes / compute.copy_rate()
    return Passes(gathered, gathered * layout.reshard + reduced)


def _local_parameters(model: Transformer, layout: Layout) -> float:
    """Parameters of a rank. Experts have ep times fewer on a rank before FSDP2, which has ep times fewer ranks."""
    return model.parameters / layout.tp / layout.sharded


def predict(
    name: str, recipe: str, layout: Layout, batch: int, sequence: int, network: Network, recompute: str = "none",
    layers: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Predict a training step.

    Args:
        name: a key of :data:`MODELS`.
        recipe: of the linear layers of blocks; the embedding and the last layer stay bf16.
        layout: how the model is spread.
        batch, sequence: sequences of a data-parallel rank, and tokens of a sequence.
        network: links of the cluster.
        recompute: ``none``, ``selective`` (every second GEMM) or ``full``.
        layers: of the model's layers so many; 0 for all.

    Returns:
        Seconds of the step and of its parts, tokens a second and GPU, and the collectives that it waits for longest.

    Raises:
        ValueError: a name, or a layout that the model does not fit.
    """
    require("model", name, tuple(MODELS))
    require("recompute", recompute, tuple(RECOMPUTED))
    for what, value in (("batch", batch), ("sequence", sequence)):
        require_int(what, value, 1)
    model, tokens = MODELS[name], batch * sequence
    model = model._replace(layers=layers or model.layers)
    layout.check(model, recipe, network)
    block = _block(model, tokens, recipe, layout, sequence, network, recompute)
    of_gathers = block.gathers
    times = block.passes.plus(_copies(of_gathers, layout))
    third = recompute != "none" and layout.gather and recipe in TWO_ORIENTATIONS
    again = of_gathers.gather * (layout.reshard + third)
    hidden = Passes(times.forward + block.communication / 2, times.backward + block.communication / 2)
    plain, embedding = dataclasses.replace(layout, gather=False), model.vocabulary * model.hidden // layout.tp
    table = _gathers(embedding, plain, BF16, network, layout.sharded, layout.tp)
    # The embedding and the first block have nothing beside their gathers, nor their reductions.
    edges = of_gathers.gather + of_gathers.reduce + table.gather + table.reduce
    local = _local_parameters(model, layout)
    head = compute.head_seconds(tokens / layout.tp, model.hidden, model.vocabulary)
    parts = {
        "compute": model.layers * sum(block.passes) + head,
        # The last layer has as many weights as the embedding.
        "copies": model.layers * sum(_copies(of_gathers, layout)) + 2 * sum(_copies(table, layout)),
        "optimizer": local * compute.OPTIMIZER / compute.copy_rate(),
        "layers' collectives": model.layers * block.communication,
        "exposed gathers": model.layers * max(0.0, of_gathers.gather - hidden.forward) + edges,
        "exposed reductions": model.layers * max(0.0, again + of_gathers.reduce - hidden.backward),
        "amaxes": _amaxes(model, model.block(tokens), layout, recipe, network),
    }
    seconds = sum(parts.values())
    state = STATE_BYTES * local
    return {
        "model": name, "recipe": recipe, **vars(layout), "batch": batch, "sequence": sequence, "recompute": recompute,
        "seconds": seconds, "tokens_a_second_a_gpu": tokens * layout.data / layout.gpus / seconds,
        "parts": parts, "most_exposed": max(EXPOSED, key=lambda part: parts[part]),
        "state_bytes": state, "state_fits": state < CONSTANTS["memory of a GPU"].value,
    }  # fmt: skip
