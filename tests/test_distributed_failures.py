"""Failures of FP8 on many devices that are known from elsewhere, each by a test that is named after it.

Those that the other files of the subpackage test in passing are not here: docs/distributed.md lists all.
"""

import failure_cases
import fsdp_cases
import pytest
import torch
from cases import QUANTIZED
from fsdp_cases import Setup
from torch import nn

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.distributed import enable_float8_all_gather
from tritonfp8.distributed.gathered_weight import ShardedWeight

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_uneven_shards_do_not_hang(ranks, recipe):
    """Ranks whose shard is padded, or empty, check what the hook returns; the others would wait for them."""
    options = {"shapes": [(5, 40), (7, 16)], "reshard": True, "poisoned": False}
    found = ranks.run(4, fsdp_cases.compare_operands, timeout=30, recipe=recipe, **options)
    assert found == [([], 2)] * 4


def test_shard_placement_fn_along_columns_is_an_error_before_any_collective(ranks):
    for message, collectives in ranks.run(2, failure_cases.shard_along_columns):
        assert "shards weights along dim 0" in message
        assert "shard_placement_fn" in message
        assert collectives == 0


def test_losses_of_the_float32_shard_quantized_are_others(ranks):
    """Why FP8 all-gather on and off differ elsewhere; ``cast="param_dtype"`` quantizes what the layer would see."""
    on, off, master = (
        ranks.run(2, fsdp_cases.train, setup=Setup("tensorwise", **options), steps=2)
        for options in ({}, {"enabled": False}, {"cast": "master"})
    )
    assert on == off
    assert [losses for losses, _ in master] != [losses for losses, _ in off]


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "mxfp8"])
def test_as_strided_on_the_result_of_the_post_hook(ranks, recipe):
    for same, message in ranks.run(2, failure_cases.after_gather, recipe=recipe):
        assert same == [True] * 3
        assert "needs the values" in message


def prepared():
    model = nn.Sequential(nn.Linear(32, 48))
    tritonfp8.convert(model, "rowwise")
    enable_float8_all_gather(model)
    return model[0].weight


def test_ops_that_fully_shard_asks_of_a_quantized_parameter():
    weight = prepared()
    shard = weight.detach().split(16)[1]
    padded = weight.new_zeros(16, 32)
    padded.narrow(0, 0, 16).copy_(shard)
    assert {type(x) for x in (shard, padded, padded[:3])} == {ShardedWeight}
    assert torch.equal(padded._data, weight._data[16:32])
    assert type(padded.view(-1)) is torch.Tensor
    assert padded.view(-1).data_ptr() == padded._data.data_ptr()


def test_ops_that_checkpoints_and_optimizers_ask_of_a_quantized_parameter():
    weight = prepared()
    values = weight._data.clone()
    assert weight.is_pinned() is False
    with torch.no_grad():
        torch._foreach_mul_([weight], 2.0)
        weight.lerp_(torch.zeros(48, 32), 0.5)
    assert torch.equal(weight._data, values)
    weight.grad = torch.ones(48, 32)
    torch.optim.AdamW([weight], lr=0.1, weight_decay=0, fused=True).step()
    assert (weight._data < values).all()


@pytest.mark.parametrize("recipe", recipes.names())
def test_column_scaling_of_sharded_tokens_gathers_nothing(ranks, recipe):
    """A generic sharding rule gathers the tokens to scale their columns; amaxes are enough."""
    first, second = ranks.run(2, failure_cases.collectives_of_sharded_tokens, recipe=recipe)
    assert first == second
    assert {op for op, _ in first} <= {"all_reduce"}
    # The amaxes of both operands of grad_weight, a block at most as long as the tokens, and never the operands.
    assert sum(n for _, n in first) <= 2 * (160 + 64)


@pytest.mark.parametrize("recipe", recipes.names())
@pytest.mark.parametrize("counts", [(0, 130), (1, 192), (127, 129)], ids=str)
def test_every_rank_chooses_the_same_path(ranks, recipe, counts):
    first, second = ranks.run(2, failure_cases.collectives_of_tokens, recipe=recipe, counts=list(counts))
    assert first == second
    assert first


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_to_local_does_not_change_what_a_scale_is_taken_of(ranks, recipe):
    as_local, as_dtensor = (ranks.run(2, failure_cases.casts_of_a_step, recipe=recipe, local=local)
                            for local in (True, False))  # fmt: skip
    assert as_local == as_dtensor
    assert len(as_local[0]) >= 4
