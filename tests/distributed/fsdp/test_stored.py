"""Weights that are stored in 8 bits, under FSDP2, HSDP and tensor parallelism: the bits of the model on one rank."""

import covering
import pytest
import stored_cases
import torch
from cases import IN_BYTES

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.one_in(6)]
each_recipe = pytest.mark.parametrize("recipe", IN_BYTES)


# How many ranks have copies of the shards, of how many ranks: FSDP2 hands on one tensor if a shard is the whole.
@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    ("recipe", "reshard", "world"),
    covering.pairs(IN_BYTES, [True, False], [(1, None), (2, 1), (2, 2), (4, 4)]),
)
def test_any_number_of_shards(request, recipe, reshard, world):
    size, copies = world
    ranks = request.getfixturevalue("two_ranks" if size == 2 else "ranks")
    assert all(ranks.run(size, stored_cases.compares, recipe=recipe, reshard=reshard, copies=copies))


@each_recipe
def test_the_bits_of_one_rank_under_fsdp2(ranks, recipe):
    # Of four ranks the last has no rows of the smallest weight.
    assert all(ranks.run(4, stored_cases.compares, recipe=recipe))
    assert all(ranks.run(2, stored_cases.compares, recipe=recipe, reshard=False))


@pytest.mark.one_in(1)
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp4", "mxfp4_weights"])
def test_mxfp4_is_sharded_between_rows(ranks, recipe, experts):
    assert all(share <= 0.51 for share in ranks.run(2, stored_cases.packed, recipe=recipe, experts=experts))


# Scales of whole tensors and of blocks; test_option has "mxfp8" in this order.
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_convert_after_fully_shard(ranks, recipe):
    assert all(ranks.run(4, stored_cases.compares, recipe=recipe, order="sharded_first"))


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (4, {"recipe": "blockwise", "copies": 2}),
        (4, {"recipe": "mxfp8", "copies": 2, "order": "sharded_first"}),
        (2, {"recipe": "rowwise", "offload": True}),
        (2, {"recipe": "mxfp8", "recompute": "yes"}),
        (2, {"recipe": "rowwise", "recompute": "reentrant"}),
        (2, {"recipe": "tensorwise", "recompute": "selective"}),
        (2, {"recipe": "blockwise", "dtype": torch.float32}),
        (2, {"recipe": "rowwise", "dtype": torch.float32, "param_dtype": torch.bfloat16}),
        (2, {"recipe": "rowwise", "root": False}),
        (2, {"recipe": "blockwise", "compiled": True, "recompute": "yes"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_option(ranks, world, options):
    assert all(ranks.run(world, stored_cases.compares, **options))


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_gathers_carry_half_of_the_bytes(ranks, recipe):
    assert all(share <= 0.52 for share in ranks.run(2, stored_cases.traffic, recipe=recipe))


def test_beside_weights_that_the_8_bit_gather_gathers(ranks):
    assert all(ranks.run(2, stored_cases.beside_trained_weights, recipe="rowwise"))


# Scales of rows, and of blocks that shards cut; with FSDP2, below, each recipe.
@pytest.mark.one_in(1)
@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_tensor_parallel(ranks, recipe):
    assert all(ranks.run(4, stored_cases.tensor_parallel, recipe=recipe))


@pytest.mark.one_in(1)
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_tensor_parallel_before_convert(ranks, recipe):
    assert all(ranks.run(2, stored_cases.tensor_parallel, recipe=recipe, first=False))


@each_recipe
def test_the_bits_of_one_rank_under_tp_and_fsdp2(ranks, recipe):
    assert all(ranks.run(4, stored_cases.tensor_parallel, recipe=recipe, rows=2))


def test_tensor_parallel_and_fsdp2_before_convert(ranks):
    assert all(ranks.run(4, stored_cases.tensor_parallel, recipe="blockwise", rows=2, first=False))


def test_each_rank_cuts_its_own_part(ranks):
    assert all(ranks.run(2, stored_cases.tensor_parallel, recipe="rowwise", source=None))


@pytest.mark.parametrize(("recipe", "how"), [("blockwise", "fsdp"), ("rowwise", "tp")])
def test_checkpoints(ranks, recipe, how, tmp_path):
    assert all(ranks.run(4, stored_cases.checkpoints, recipe=recipe, how=how, folder=str(tmp_path)))


def test_a_model_that_is_never_whole_in_high_precision(ranks):
    # One of six files, a layer that is read from it, and the values of this rank's quarter.
    assert all(share < 0.5 for share in ranks.run(4, stored_cases.made_on_meta, recipe="blockwise"))


def test_tools_that_read_weights(ranks):
    assert all(ranks.run(2, stored_cases.other_tools, recipe="rowwise"))


def test_changes_of_weights_that_are_gathered(ranks):
    assert all(ranks.run(2, stored_cases.changed_while_gathered, recipe="blockwise"))


def test_copies_casts_and_pickles(ranks):
    assert all(ranks.run(2, stored_cases.moved_and_copied, recipe="blockwise"))


def test_revert_and_convert_again(ranks):
    assert all(ranks.run(2, stored_cases.reverted, recipe="blockwise"))


@pytest.mark.parametrize(
    ("trains", "experts", "options"),
    [
        (False, False, {"use_orig_params": False}),
        (True, False, {"use_orig_params": True}),
        (False, True, {"use_orig_params": True}),
    ],
)
def test_fsdp_version_1_is_an_error_when_it_wraps(ranks, trains, experts, options):
    for found in ranks.run(2, stored_cases.wrapped_by_fsdp1, trains=trains, experts=experts, **options):
        assert "FSDP version 1" in found
        assert "use torch.distributed.fsdp.fully_shard (FSDP2)" in found


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("number", "0.up.weight is stored in 8 bits, and FSDP2 cannot reshard such a weight to fewer ranks"),
        ("columns", "weight is stored in 8 bits, and FSDP2 can shard such a weight by rows only"),
        ("float16", "0.up.weight is stored in 8 bits, and such a weight serves layers in bfloat16 or float32"),
        ("conv1d", "Leave the Conv1D layers out of convert by filter="),
        ("gather twice", "skipped: stored in 8 bits: FSDP2 gathers its codes without this"),
        ("copy", "does not write to a weight that is stored in 8 bits and sharded"),
    ],
)
def test_what_does_not_work_is_an_error(ranks, how, message):
    assert all(message in found for found in ranks.run(4, stored_cases.refused, how=how))
