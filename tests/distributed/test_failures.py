"""Failures of FP8 on many devices that are known from elsewhere, each by a test that is named after it.

Those that the other files of the subpackage test in passing are not here: docs/distributed.md lists all.
"""

import failure_cases
import fsdp_cases
import pytest
from cases import QUANTIZED
from fsdp_cases import Setup

from tritonfp8 import recipes

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_uneven_shards_do_not_hang(ranks, recipe):
    """Ranks whose shard is padded, or empty, check what the hook returns; the others would wait for them."""
    options = {"shapes": [(5, 40), (7, 16)], "reshard": True, "poisoned": False}
    found = ranks.run(4, fsdp_cases.compare_operands, timeout=30, recipe=recipe, **options)
    assert found == [([], 2)] * 4


def test_shard_placement_fn_along_columns_is_an_error_of_all_ranks_alike(ranks):
    (first, collectives), second = ranks.run(2, failure_cases.shard_along_columns)
    assert (first, collectives) == second
    assert "weights that are sharded along dim 0" in first
    assert "shard_placement_fn" in first
    # FSDP's own, which comes before the model's hooks the first time.
    assert collectives == 1


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
