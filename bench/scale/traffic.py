"""Bytes of a block's collectives, counted in small models by ``count_collective_bytes`` and scaled by shapes.

A probe trains one and two blocks of a small Llama on one rank of torch's fake process group, as ``bench.distributed``
trains: the difference is a block. Bytes are linear in a few sizes of the block; the probes determine the factors.
"""

import functools
import itertools
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from bench.distributed.compare import Job, Settings, Training
from bench.distributed.models import GATHER, TP, WAYS, Contestant
from tritonfp8.distributed import count_collective_bytes

FILE = Path(__file__).parents[1] / "results" / "scale" / "bytes.json"
FSDP = "FSDP2"
RECIPES = ("rowwise", "tensorwise", "blockwise")
RANKS = 2
VOCABULARY = 256


class Block(NamedTuple):
    """Sizes of a decoder block: q and kv are the features of queries, and of keys or values."""

    hidden: int
    ffn: int
    q: int
    kv: int
    tokens: int

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Out and in features of the linear layers."""
        h, f = self.hidden, self.ffn
        return [(self.q, h), (self.kv, h), (self.kv, h), (h, self.q), (f, h), (f, h), (h, f)]

    @property
    def weights(self) -> int:
        """Elements of the linear layers."""
        return sum(n * k for n, k in self.linears)

    def sizes(self, way: str) -> tuple[int, ...]:
        """The sizes in which bytes are linear."""
        outs, ins = (sum(sides) for sides in zip(*self.linears, strict=True))
        if way == FSDP:
            return self.weights, outs + ins, self.hidden, 1
        return self.tokens * self.hidden, self.tokens, outs, ins, self.hidden, 1


# Multiples of 128 on each rank, as in large models: a block of a scale never spans ranks. The last one is a check.
PROBES = (
    Block(256, 512, 256, 256, 256),
    Block(512, 512, 256, 256, 256),
    Block(256, 1024, 256, 256, 256),
    Block(256, 512, 512, 256, 512),
    Block(256, 768, 512, 512, 256),
    Block(512, 768, 512, 256, 512),
    Block(512, 1280, 256, 256, 512),
)
HEAD_DIM = 128


def _config(block: Block, layers: int, folder: str) -> str:
    path = Path(folder) / f"{layers}.json"
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": block.hidden,
        "intermediate_size": block.ffn, "num_hidden_layers": layers, "num_attention_heads": block.q // HEAD_DIM,
        "num_key_value_heads": block.kv // HEAD_DIM, "head_dim": HEAD_DIM, "vocab_size": VOCABULARY,
    }  # fmt: skip
    path.write_text(json.dumps(config))
    return str(path)


def _contestants(way: str, settings: Settings) -> dict[str, Contestant]:
    """The contestants of ``bench.distributed`` whose bytes differ, by recipe."""
    suffix = f", {GATHER}" if way == FSDP else f", {WAYS['float8']}"
    names = {"bf16": "bf16" if way == FSDP else f"bf16, {TP}", **{r: f"{r}{suffix}" for r in settings.recipes}}
    found = {each.name: each for each in settings.contestants()}
    return {recipe: found[name] for recipe, name in names.items()}


def _counted(block: Block, layers: int, way: str, recipes: Sequence[str], ranks: int) -> dict[str, tuple[dict, dict]]:
    tp = 1 if way == FSDP else ranks
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            _config(block, layers, folder), tuple(recipes), 1, 1, block.tokens, ranks // tp, tp, peers=False,
            ways=("float8",),
        )  # fmt: skip
        job, found = Job.make(settings, torch.device("cpu")), {}
        for recipe, contestant in _contestants(way, settings).items():
            training = Training(job, contestant)
            training.step(job.batches[0])
            with count_collective_bytes() as traffic:
                training.step(job.batches[1])
            found[recipe] = dict(traffic.bytes), dict(traffic.calls)
    return found


def differences(probes: Sequence[Block], recipes: Sequence[str], ranks: int) -> list[dict[str, Any]]:
    """A row of bytes and calls of one block, for each probe, way and recipe, on the ranks of the process group."""
    rows = []
    for block, way in itertools.product(probes, (FSDP, TP)):
        one, two = (_counted(block, layers, way, recipes, ranks) for layers in (1, 2))
        for recipe, counts in two.items():
            sizes, calls = (
                {kind: n - of[kind] for kind, n in each.items()} for each, of in zip(counts, one[recipe], strict=True)
            )
            row = {"way": way, "recipe": recipe, "block": block._asdict()}
            rows.append(row | {"bytes": sizes, "calls": calls})
    return rows


def count(probes: Sequence[Block] = PROBES, recipes: Sequence[str] = RECIPES) -> list[dict[str, Any]]:
    """The differences of the probes in a fake process group, whose collectives move no data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        # The other ranks do not exist, so the check that all ranks gather alike would fail.
        with mock.patch("tritonfp8.distributed.fsdp.all_gather.Agreement"):
            return differences(probes, recipes, RANKS)
    finally:
        dist.destroy_process_group()


class Traffic(NamedTuple):
    """Bytes and calls of a block's collectives in a step, by kind."""

    bytes: Mapping[str, float]
    calls: Mapping[str, float]


@functools.cache
def _factors(way: str, recipe: str) -> dict[str, tuple[np.ndarray, float]]:
    """Factors of each size, and the number of calls, by kind."""
    rows = [row for row in json.loads(FILE.read_text())["rows"] if (row["way"], row["recipe"]) == (way, recipe)]
    if not rows:
        raise ValueError(f"no bytes of {recipe} under {way} in {FILE.name}: python -m bench.scale --count")
    sizes = np.array([Block(**row["block"]).sizes(way) for row in rows[:-1]], float)
    # Columns of one magnitude, for the precision of the solution.
    scale = np.abs(sizes).max(0)
    found = {}
    for kind in rows[0]["bytes"]:
        counted = np.array([row["bytes"][kind] for row in rows[:-1]], float)
        factors = np.linalg.lstsq(sizes / scale, counted, rcond=None)[0] / scale
        found[kind] = factors, float(rows[0]["calls"][kind])
    return found


def of_block(block: Block, way: str, recipe: str) -> Traffic:
    """Bytes and calls of a block's collectives in a step, by kind.

    Args:
        block: the sizes; ``tokens`` of all ranks that share a layer.
        way: :data:`FSDP` (float32 parameters, bf16 compute, weights gathered in 8 bits by recipes that quantize, and
            gathered again in backward), or ``TP`` (tokens sharded between the layers).
        recipe: ``bf16`` or one of :data:`RECIPES`.
    """
    sizes, found = np.array(block.sizes(way), float), _factors(way, recipe)
    return Traffic(
        {kind: max(0.0, float(factors @ sizes)) for kind, (factors, _) in found.items()},
        {kind: calls for kind, (_, calls) in found.items()},
    )
