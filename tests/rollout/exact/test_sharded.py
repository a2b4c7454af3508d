"""FSDP2: a model that is sharded trains with the bits that each rank generates with."""

import pytest
import torch
from exact_models import of_family
from rollout_models import IDS, MASK, OPTIONS, step
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tritonfp8
from tritonfp8.distributed import enable_float8_all_gather
from tritonfp8.rollout import Rollout, check, make_exact, why_inexact

pytestmark = pytest.mark.xdist_group("ranks")
PROCESSES = 2
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def trains(mesh, kind, shards_first):
    model = of_family(kind, torch.float32)
    tritonfp8.convert(model, "rowwise", batch_invariant=True)
    enable_float8_all_gather(model, "param_dtype")
    if not shards_first:
        make_exact(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=BFLOAT16)
    fully_shard(model, mesh=mesh, mp_policy=BFLOAT16)
    assert why_inexact(make_exact(model)) == {}
    rollout = Rollout(model)
    for _ in range(2):
        step(model, 0.1)
        rollout.refresh()
        found = check(model, rollout, IDS, MASK, **OPTIONS)
        assert (found.max_difference, found.module, found.codes) == (0, None, ())


@pytest.mark.parametrize(("kind", "shards_first"), [("qwen3", False), ("qwen3", True), ("moe", False)])
def test_training_and_generation_agree(ranks, kind, shards_first):
    ranks.run(2, trains, kind, shards_first)
