"""FSDP2: a model that is sharded trains with the bits that each rank generates with."""

import pytest
import torch
from exact_models import grpo_steps, of_family
from rollout_models import IDS, MASK, OPTIONS
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import tritonfp8
from tritonfp8.distributed import enable_float8_all_gather
from tritonfp8.rollout import Rollout, check, make_exact, why_inexact

pytestmark = pytest.mark.xdist_group("ranks")
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def whole(model):
    return {name: x.full_tensor().clone() for name, x in model.state_dict().items()}


def trains(mesh, kind, shards_first, steps, rate=3e-2):
    """GRPO on what each rank generates. Returns the largest difference from 1 of a ratio, and whether weights moved."""
    device = mesh.device_type
    model = of_family(kind, torch.float32).to(device)
    tritonfp8.convert(model, "rowwise", batch_invariant=True)
    enable_float8_all_gather(model, "param_dtype")
    if not shards_first:
        make_exact(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=BFLOAT16)
    fully_shard(model, mesh=mesh, mp_policy=BFLOAT16)
    assert why_inexact(make_exact(model)) == {}
    before = whole(model)
    rollout = Rollout(model)
    ratios = grpo_steps(model, rollout, steps, rate, seed=mesh.get_rank())
    found = check(model, rollout, IDS.to(device), MASK.to(device), **OPTIONS)
    assert (found.max_difference, found.module, found.codes) == (0, None, ())
    moved = [not torch.equal(x, before[name]) for name, x in whole(model).items()]
    return max(float((ratio - 1).abs().max()) for ratio in ratios), all(moved)


@pytest.mark.parametrize(("kind", "shards_first"), [("qwen3", False), ("qwen3", True), ("moe", False)])
def test_training_and_generation_agree(ranks, kind, shards_first):
    assert ranks.run(2, trains, kind, shards_first, 2) == [(0, True)] * 2


@pytest.mark.slow
def test_fifty_steps(ranks):
    assert ranks.run(2, trains, "qwen3", False, 50, 2e-3) == [(0, True)] * 2


@pytest.mark.multigpu
@pytest.mark.parametrize("kind", ["qwen3", "moe"])
def test_fifty_steps_on_two_gpus(gpus, kind):
    assert gpus.run(2, trains, kind, False, 50, 2e-3) == [(0, True)] * 2
