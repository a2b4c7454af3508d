"""Seconds of a decoder block on one GPU, from the measured kernels in ``bench/results/nvidia-h200``."""

import functools
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.contest.cases import COPY, MODEL, MODEL_KERNELS
from bench.contest.grouped import EXPERTS_KERNELS
from bench.models import BIASED, CONFIGS
from bench.scale.traffic import Block
from tritonfp8.advice.predict import ATTENTION_PASSES
from tritonfp8.recipes import get
from tritonfp8.specs import TENSORWISE

MEASURED = Path(__file__).parents[1] / "results" / "nvidia-h200"
# Experts in bf16 that models are compared with: torch's grouped GEMM.
BF16, TORCH_EXPERTS = "bf16", "torch bf16"
# Bytes of an element of a tensor, of a code, and of a float32 master.
HIGH, CODE, MASTER = 2, 1, 4
# Elements that fused kernels read and write for a token, forward and backward. SwiGLU reads gate and up and writes a
# product, then reads these and its gradient and writes two gradients. Two norms each read a branch and the residual
# and write their sum and the result, and as many in backward. Rotations read and write queries and keys.
SWIGLU, NORMS, ROTATIONS = (3, 5), (8, 8), (2, 2)
# Bytes of a logit in the loss: it is read for the maximum and the sum, read again for its gradient, which is written.
LOSS = 4 * HIGH
# Reads and writes of a parameter in AdamW (parameter, gradient, two moments) and in the clip of gradients, in float32.
OPTIMIZER = MASTER * (7 + 3)
# Share of the forward GEMMs that backward computes again. Selective checkpointing of torchtitan saves every second one
# (https://github.com/pytorch/torchtitan/blob/main/torchtitan/distributed/activation_checkpoint.py) and attention.
RECOMPUTED = {"none": 0.0, "selective": 0.5, "full": 1.0}


class Passes(NamedTuple):
    """Seconds of forward and backward."""

    forward: float
    backward: float

    def plus(self, other: "Passes") -> "Passes":
        """The sum."""
        return Passes(self.forward + other.forward, self.backward + other.backward)


def cast_bytes(recipe: str, of_tokens: float, weights: float) -> float:
    """What casts read and write at least, forward and backward.

    Inputs and gradients of outputs are cast in both orientations. They are read once, or twice by a recipe whose scales
    span a dim: no code of the second orientation is known before all of the matrix was read. Weights are read for each
    of two casts, and once more if the matrix has one scale.

    Args:
        recipe: a recipe that quantizes.
        of_tokens: elements of inputs and of gradients of outputs.
        weights: elements of weights.
    """
    spec = get(recipe).grad_input.lhs
    assert spec is not None
    reads = 2 if -1 in spec.block else 1
    weight_reads = 3 if spec.block == TENSORWISE else 2
    return of_tokens * (reads * HIGH + 2 * CODE) + weights * (weight_reads * HIGH + 2 * CODE)


@functools.cache
def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a measured file."""
    found: list[dict[str, Any]] = json.loads((MEASURED / f"{name}.json").read_text())["rows"]
    return found


@functools.cache
def copy_rate() -> float:
    """Bytes a second that a copy reads and writes."""
    return statistics.median(row["bytes"] / row["seconds"] for row in rows("quantize") if row["contender"] == COPY)


def _distance(shape: Sequence[int], other: Sequence[int]) -> float:
    return sum(abs(math.log(x / y)) for x, y in zip(shape, other, strict=True))


@functools.cache
def _gemm_rates(recipe: str, grad_weight: bool) -> dict[tuple[int, int, int], float]:
    case = "rowwise" if recipe == BF16 else "blockwise grad_weight" if recipe == "blockwise" and grad_weight else recipe
    contender = BF16 if recipe == BF16 else "tritonfp8 precise"
    return {
        tuple(row["shape"]): row["flops"] / row["seconds"]
        for row in rows("scaled_matmul")
        if (row["case"], row["contender"]) == (case, contender)
    }


def gemm_seconds(recipe: str, m: float, n: float, k: float, grad_weight: bool = False) -> float:
    """Seconds of a GEMM ``[m, k] x [k, n]`` at the rate of the nearest measured shape, in logarithms."""
    rates = _gemm_rates(recipe, grad_weight)
    nearest = min(rates, key=lambda shape: _distance(shape, (m, n, k)))
    return 2 * m * n * k / rates[nearest]


class _Layers(NamedTuple):
    """A few decoder blocks of one model: seconds of their step, and of its kernels."""

    name: str
    block: Block
    layers: int
    head_dim: int
    sequence: int
    step: float
    seconds: dict[str, float]


@functools.cache
def measured_layers(recipe: str) -> list[_Layers]:
    """The Llama-like models of ``bench.report --only model``."""
    contender = BF16 if recipe == BF16 else f"{recipe} precise"
    steps = {(row["case"], row["name"]): row["seconds"] for row in rows("model") if row["contender"] == contender}
    found = []
    for row in rows("model"):
        if row["case"] != MODEL_KERNELS.name or row["contender"] != contender or row["name"] in BIASED:
            continue
        layers, hidden, ffn, heads, kv_heads, batch, sequence = row["shape"]
        head = CONFIGS.get(row["name"], {}).get("head_dim", hidden // heads)
        block = Block(hidden, ffn, heads * head, kv_heads * head, batch * sequence)
        found.append(_Layers(row["name"], block, layers, head, sequence, steps[MODEL.name, row["name"]], row))
    return found


def _elements(block: Block, tp: int) -> tuple[float, float]:
    """Elements that kernels between GEMMs read and write, forward and backward."""
    forward, backward = (
        block.tokens / tp * (swiglu * block.ffn + norms * block.hidden + turned * (block.q + block.kv))
        for swiglu, norms, turned in zip(SWIGLU, NORMS, ROTATIONS, strict=True)
    )
    return forward, backward


def attention_flops(block: Block, sequence: int, tp: int = 1) -> float:
    """FLOPs of causal attention, forward and backward."""
    return ATTENTION_PASSES * 4 * block.tokens * sequence / 2 * block.q / tp


@functools.cache
def attention_rate(head_dim: int) -> float:
    """FLOP/s of attention by the size of a head: blocks in bf16 without GEMMs and what moves as a copy."""
    dims = {each.head_dim for each in measured_layers(BF16)}
    nearest = min(dims, key=lambda dim: abs(math.log(dim / head_dim)))
    return statistics.median(
        each.layers
        * attention_flops(each.block, each.sequence)
        / (each.seconds["other_seconds"] - each.layers * sum(_elements(each.block, 1)) * HIGH / copy_rate())
        for each in measured_layers(BF16)
        if each.head_dim == nearest
    )


def _cast_elements(block: Block, tp: int) -> tuple[float, float]:
    """Elements of inputs, and of gradients of outputs, that a block casts."""
    inputs = 2 * block.hidden + (block.q + block.ffn) / tp
    gradients = 2 * block.hidden + (block.q + 2 * block.kv + 2 * block.ffn) / tp
    return block.tokens * inputs, block.tokens * gradients


def _nearest(recipe: str, hidden: int) -> _Layers:
    return min(measured_layers(recipe), key=lambda each: abs(math.log(each.block.hidden / hidden)))


@functools.cache
def over_kernels(recipe: str, hidden: int) -> float:
    """Seconds of a step over its kernels' in the measured model of nearest width: time between kernels, and clocks."""
    nearest = _nearest(recipe, hidden)
    return max(1.0, nearest.step / nearest.seconds["seconds"])


@functools.cache
def cast_rate(recipe: str, hidden: int) -> float:
    """Bytes a second of the casts in a step, of the measured model of nearest width."""
    nearest = _nearest(recipe, hidden)
    size = cast_bytes(recipe, sum(_cast_elements(nearest.block, 1)), nearest.block.weights)
    return nearest.layers * size / nearest.seconds["cast_seconds"]


def _gemms(block: Block, recipe: str, tp: int) -> Passes:
    forward = backward = 0.0
    for index, (n, k) in enumerate(block.linears):
        if not n * k:
            continue
        # The fourth and the last read what the others computed: their in features are sharded.
        n, k = (n, k / tp) if index in (3, 6) else (n / tp, k)
        m = block.tokens
        forward += gemm_seconds(recipe, m, n, k)
        backward += gemm_seconds(recipe, m, k, n) + gemm_seconds(recipe, n, k, m, grad_weight=True)
    return Passes(forward, backward)


def _casts(block: Block, recipe: str, tp: int, shards: int) -> Passes:
    if recipe == BF16:
        return Passes(0.0, 0.0)
    rate, weights = cast_rate(recipe, block.hidden), block.weights / tp / shards
    return Passes(*(cast_bytes(recipe, of, weights / 2) / rate for of in _cast_elements(block, tp)))


def kernel_seconds(
    block: Block, recipe: str, sequence: int, head_dim: int, tp: int = 1, shards: int = 1, recompute: str = "none"
) -> Passes:
    """Seconds of the kernels of a decoder block, without collectives.

    Args:
        block: its sizes; ``tokens`` of the ranks that share it.
        recipe: of its linear layers.
        sequence: tokens that attend to each other.
        head_dim: size of a head.
        tp: ranks that share it.
        shards: ranks that each cast a part of a weight.
        recompute: a key of :data:`RECOMPUTED`.
    """
    moved = Passes(*(each * HIGH / copy_rate() for each in _elements(block, tp)))
    attention = attention_flops(block, sequence, tp) / attention_rate(head_dim) / ATTENTION_PASSES
    attentions = Passes(attention, (ATTENTION_PASSES - 1) * attention)
    linear = _gemms(block, recipe, tp).plus(_casts(block, recipe, tp, shards))
    again = RECOMPUTED[recompute] * linear.forward
    again += moved.forward if recompute != "none" else 0.0
    again += attention if recompute == "full" else 0.0
    return linear.plus(moved).plus(attentions).plus(Passes(0.0, again))


def block_seconds(block: Block, recipe: str, *arguments: Any, **options: Any) -> Passes:
    """Seconds of a decoder block in a step. Arguments are of :func:`kernel_seconds`."""
    factor = over_kernels(recipe, block.hidden)
    forward, backward = kernel_seconds(block, recipe, *arguments, **options)
    return Passes(factor * forward, factor * backward)


def experts_seconds(name: str, contender: str, tokens: float, recompute: str = "none") -> Passes:
    """Seconds of a measured layer of experts with its router, in proportion to the tokens.

    Args:
        name: its set of shapes in ``experts.json``.
        contender: a recipe, where bf16 is this package's code; or :data:`TORCH_EXPERTS`.
        tokens: of a rank.
        recompute: a key of :data:`RECOMPUTED`.
    """
    (row,) = (
        row for row in rows("experts")
        if (row["case"], row["set"], row["contender"]) == (EXPERTS_KERNELS.name, name, contender)
    )  # fmt: skip
    forward = row["seconds"] * tokens / row["shape"][0] / 3
    return Passes(forward, (2 + RECOMPUTED[recompute]) * forward)


def head_seconds(tokens: float, hidden: int, vocabulary: int) -> float:
    """Seconds of the last layer in bf16 and of the loss, forward and backward."""
    shapes = ((tokens, vocabulary, hidden), (tokens, hidden, vocabulary), (vocabulary, hidden, tokens))
    return sum(gemm_seconds(BF16, *shape) for shape in shapes) + tokens * vocabulary * LOSS / copy_rate()
