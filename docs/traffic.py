"""Bytes of each collective of a training step, counted from the collectives themselves.

One layer of each kind runs a step on one rank of ``RANKS`` in torch's fake process group: collectives move no data, and
the layers compute as usual.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.utils import _pytree as pytree

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.distributed import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    count_collective_bytes,
    enable_float8_all_gather,
)

RANKS = 4


class Sizes(NamedTuple):
    """Sizes of a linear layer: ``weight [n, k]``, and the tokens of all ranks."""

    n: int
    k: int
    tokens: int


LAYER = Sizes(4096, 1024, 2048)
PASSES = ("forward", "backward")
Parts = Counter[tuple[str, torch.dtype]]
"""Bytes by collective and dtype."""


class _Traffic(count_collective_bytes):
    def __init__(self) -> None:
        super().__init__()
        self.parts: Parts = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = Counter(self.bytes)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for kind, size in (self.bytes - before).items():
            dtype = next(x.dtype for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
            self.parts[kind, dtype] += size
        return out


def _step(module: nn.Module, x: Tensor) -> dict[str, Parts]:
    found = {}
    with _Traffic() as traffic:
        out = module(x)
    found["forward"] = traffic.parts
    grad = torch.ones_like(out)
    with _Traffic() as traffic:
        out.backward(grad)
    found["backward"] = traffic.parts
    return found


def fsdp(mesh: DeviceMesh, recipe: str, sizes: Sizes) -> dict[str, Parts]:
    """FSDP2 with float32 parameters and gradients and bf16 compute. Counts the second step: the first also sets up."""
    model = nn.Sequential(nn.Linear(sizes.k, sizes.n, bias=False))
    tritonfp8.convert(model, recipe)
    if recipes.get(recipe).output.quantized:
        enable_float8_all_gather(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    x = torch.ones(2, sizes.k)
    _step(model, x)
    return _step(model, x)


def _sharded(mesh: DeviceMesh, recipe: str, style: Any, in_features: int, out_features: int) -> nn.Module:
    layer = nn.Linear(in_features, out_features, bias=False, dtype=torch.bfloat16)
    tritonfp8.convert(layer, recipe)
    return parallelize_module(layer, mesh, style)


def _rows(mesh: DeviceMesh, tokens: int, features: int) -> Tensor:
    return torch.ones(tokens // mesh.size(), features, dtype=torch.bfloat16).requires_grad_()


def colwise(mesh: DeviceMesh, recipe: str, sizes: Sizes) -> dict[str, Parts]:
    """A layer with sharded out features, and an input with sharded tokens."""
    layer = _sharded(mesh, recipe, Float8ColwiseParallel(input_layouts=Shard(0)), sizes.k, sizes.n)
    return _step(layer, _rows(mesh, sizes.tokens, sizes.k))


def rowwise(mesh: DeviceMesh, recipe: str, sizes: Sizes) -> dict[str, Parts]:
    """The layer after a colwise one: in features sharded, and output tokens sharded."""
    layer = _sharded(mesh, recipe, Float8RowwiseParallel(output_layouts=Shard(0)), sizes.n, sizes.k)
    x = torch.ones(sizes.tokens, sizes.n // mesh.size(), dtype=torch.bfloat16).requires_grad_()
    return _step(layer, x)


def tokens(mesh: DeviceMesh, recipe: str, sizes: Sizes) -> dict[str, Parts]:
    """A layer with a whole weight on each rank's own tokens, in the style ``SequenceParallel``."""
    style = SequenceParallel(sequence_dim=0, use_local_output=True)
    return _step(_sharded(mesh, recipe, style, sizes.k, sizes.n), _rows(mesh, sizes.tokens, sizes.k))


class Way(NamedTuple):
    """A parallelism mode, the data that its two passes send, and a step in that mode."""

    name: str
    forward: str
    backward: str
    step: Callable[[DeviceMesh, str, Sizes], dict[str, Parts]]


WAYS = (
    Way("FSDP2", "weight [n, k] gathered", "weight gathered again, its gradient reduced", fsdp),
    Way("SP, colwise layer", "input [tokens, k] gathered, for two GEMMs", "gradient of the input reduced", colwise),
    Way("SP, rowwise layer", "output [tokens, k] reduced", "gradient of the output gathered", rowwise),
    Way("Tokens sharded, weight whole", "only scales are shared", "only scales are shared", tokens),
)


def measured(sizes: Sizes = LAYER) -> dict[str, dict[str, dict[str, Parts]]]:
    """Bytes by parallelism mode, recipe and pass."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    mesh = init_device_mesh("cpu", (RANKS,))
    # The other ranks do not exist, so the check that all ranks gather alike would fail.
    with mock.patch("tritonfp8.distributed.fsdp.all_gather.Agreement"):
        found = {way.name: {recipe: way.step(mesh, recipe, sizes) for recipe in recipes.names()} for way in WAYS}
    dist.destroy_process_group()
    return found
