"""Failures of FP8 on many devices that are known from elsewhere, each by a test that is named after it.

The failures that the other files of the subpackage test in passing are not here: docs/distributed.md lists all.
"""

import pytest
import torch
from cases import QUANTIZED, normal
from fsdp_cases import BFLOAT16, Setup, compare_operands, train
from raised import raised
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from tp_cases import PLAIN, Mlp, Recorder, mlp_plan, on_mesh

import tritonfp8
from tritonfp8 import distributed, recipes
from tritonfp8.distributed import count_collective_bytes, enable_float8_all_gather
from tritonfp8.functional import linear

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_uneven_shards_do_not_hang(ranks, recipe):
    """Ranks whose shard is padded, or empty, check what the hook returns; the others would wait for them."""
    found = ranks.run(4, compare_operands, recipe, [(5, 40), (7, 16)], reshard=True, poisoned=False, timeout=30)
    assert found == [([], 2)] * 4


def shard_along_columns(mesh):
    """The error of a forward if ``shard_placement_fn`` shards along columns, and its number of collectives."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32))
    tritonfp8.convert(model, "rowwise")
    enable_float8_all_gather(model)
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    with count_collective_bytes() as counted:
        return raised(lambda: model(torch.ones(1, 64))), sum(counted.calls.values())


def test_shard_placement_fn_along_columns_is_an_error_of_all_ranks_alike(ranks):
    (first, collectives), second = ranks.run(2, shard_along_columns)
    assert (first, collectives) == second
    assert first.startswith("ValueError")
    assert "weights that are sharded along dim 0" in first
    assert "shard_placement_fn" in first
    # FSDP's own, which comes before the model's hooks the first time.
    assert collectives == 1


def test_losses_of_the_float32_shard_quantized_are_others(ranks):
    """Why FP8 all-gather on and off differ elsewhere; ``cast="param_dtype"`` quantizes what the layer would see."""
    on, off, master = (
        ranks.run(2, train, Setup("tensorwise", **options), 2)
        for options in ({}, {"enabled": False}, {"cast": "master"})
    )
    assert on == off
    assert [losses for losses, _ in master] != [losses for losses, _ in off]


def after_gather(mesh, recipe):
    """For a weight that FSDP gathered: whether views share its bytes, and the error of an unsupported view."""
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    tritonfp8.convert(model, recipe)
    enable_float8_all_gather(model)
    fully_shard(model, mesh=mesh, mp_policy=BFLOAT16)
    # The first forward registers the gather hooks with FSDP.
    model(torch.ones(1, 64))
    model.unshard()
    weight, same = model[0].weight.data, []
    for view in (weight.as_strided((32, 64), (64, 1), 0), weight.view(32, 64), weight.detach()):
        same.append(type(view) is type(weight) and view._codes.data_ptr() == weight._codes.data_ptr())
    return same, raised(lambda: weight.as_strided((64, 32), (1, 64), 0))


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "mxfp8"])
def test_as_strided_on_the_result_of_the_post_hook(ranks, recipe):
    for same, message in ranks.run(2, after_gather, recipe):
        assert same == [True] * 3
        assert message.startswith("NotImplementedError")
        assert "needs the values" in message


def collectives_of_sharded_tokens(mesh, recipe):
    """``(op, elements)`` of forward and backward of a layer whose tokens are sharded and whose weight is not."""
    x = on_mesh(normal(300, 160, seed=1), mesh, [Shard(0)])
    weight = on_mesh(normal(64, 160, seed=2), mesh, [Replicate()])
    with Recorder() as seen:
        linear(x, weight, None, recipe).backward(on_mesh(normal(300, 64, seed=3), mesh, [Shard(0)]).detach())
    return [(op, n) for op, _, n in seen.sent]


@pytest.mark.parametrize("recipe", recipes.names())
def test_column_scaling_of_sharded_tokens_gathers_nothing(ranks, recipe):
    """A generic sharding rule gathers the tokens to scale their columns; amaxes are enough."""
    first, second = ranks.run(2, collectives_of_sharded_tokens, recipe)
    assert first == second
    assert {op for op, _ in first} <= {"all_reduce"}
    # The amaxes of both operands of grad_weight, a block at most as long as the tokens, and never the operands.
    assert sum(n for _, n in first) <= 2 * (160 + 64)


def collectives_of_tokens(mesh, recipe, counts):
    """``(op, dtype, elements)`` of forward and backward of a layer that gathers these numbers of tokens."""
    x = normal(sum(counts), 96, seed=1).split(counts)[mesh.get_local_rank()].clone().requires_grad_()
    weight = on_mesh(normal(80, 96, seed=2), mesh, [Shard(0)])
    grad = on_mesh(normal(sum(counts), 80, seed=3), mesh, [Shard(1)]).detach()
    with distributed.token_counts(counts), Recorder() as seen:
        whole = DTensor.from_local(x, mesh, [Shard(0)], run_check=False, shape=(sum(counts), 96), stride=(96, 1))
        linear(whole, weight, None, recipe).backward(grad)
    return seen.sent


@pytest.mark.parametrize("recipe", recipes.names())
@pytest.mark.parametrize("counts", [(0, 130), (1, 192), (127, 129)], ids=str)
def test_every_rank_chooses_the_same_path(ranks, recipe, counts):
    first, second = ranks.run(2, collectives_of_tokens, recipe, counts)
    assert first == second
    assert first


def casts_of_a_step(mesh, recipe, local):
    """Codes and scales of every cast of an MLP's forward, whose inner activations are plain tensors if ``local``."""
    model = Mlp()
    with torch.no_grad():
        # The features of the two ranks differ in magnitude.
        model.gate.weight[48:] *= 100
    tritonfp8.convert(model, recipe)
    parallelize_module(model, mesh, mlp_plan(PLAIN, use_local_output=local))
    with Recorder() as seen:
        model(normal(40, 64, seed=5))
    return [[t.flatten().clone().view(torch.uint8).tolist() for t in out] for _, out in seen.casts]


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_to_local_does_not_change_what_a_scale_is_taken_of(ranks, recipe):
    as_local, as_dtensor = (ranks.run(2, casts_of_a_step, recipe, local) for local in (True, False))
    assert as_local == as_dtensor
    assert len(as_local[0]) >= 4
