"""FSDP2 and expert parallelism shard stored weights of experts as codes, and change no bit."""

import covering
import pytest
import stored_expert_cases
import torch
from cases import QUANTIZED

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.one_in(4)]
PROCESSES = 4


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_the_bits_of_one_process(ranks, recipe):
    assert ranks.run(2, stored_expert_cases.trains, recipe=recipe) == [[4] * 4] * 2


@pytest.mark.parametrize(
    ("world", "experts", "parts"),
    [(2, 3, [2, 1]), (4, 3, [1, 1, 1, 0])],
    ids=["uneven", "a rank without experts"],
)
def test_any_number_of_experts(ranks, world, experts, parts):
    found = ranks.run(world, stored_expert_cases.trains, recipe="blockwise", experts=experts)
    assert [each[0] for each in found] == parts


@pytest.mark.parametrize(
    "options",
    [{"reshard": False}, {"recompute": True}, {"compiled": True}, {"family": "gpt_oss"}, {"family": "mixtral"}],
    ids=["gathered once", "recompute", "compiled", "gpt_oss", "mixtral"],
)
def test_other_ways(ranks, options):
    assert ranks.run(2, stored_expert_cases.trains, recipe="rowwise", **options)


def test_a_policy_of_bfloat16(ranks):
    assert ranks.run(2, stored_expert_cases.computes_in_bfloat16, recipe="rowwise") == [torch.bfloat16] * 2


def test_hsdp(ranks):
    assert ranks.run(4, stored_expert_cases.trains, recipe="mxfp8", copies=2) == [[4] * 4] * 4


@pytest.mark.one_in(1)
@pytest.mark.parametrize(
    ("recipe", "reshard", "world"), covering.each(QUANTIZED, [True, False], [(1, None), (2, 2), (4, 4), (2, 1)])
)
def test_a_shard_that_is_the_whole(request, recipe, reshard, world):
    size, copies = world
    ranks = request.getfixturevalue("two_ranks" if size == 2 else "ranks")
    found = ranks.run(size, stored_expert_cases.trains, recipe=recipe, reshard=reshard, copies=copies, experts=3)
    assert [each[0] for each in found] == ([2, 1] if world == (2, 1) else [3] * size)


@pytest.mark.parametrize(
    ("recipe", "experts", "fsdp", "parts"),
    [("rowwise", 8, False, [2] * 4), ("blockwise", 3, False, [1, 1, 1, 0]), ("mxfp8", 8, True, [2] * 4)],
    ids=["even", "a rank without experts", "with FSDP2"],
)
def test_expert_parallelism(ranks, recipe, experts, fsdp, parts):
    found = ranks.run(4, stored_expert_cases.expert_parallel, recipe=recipe, experts=experts, fsdp=fsdp)
    assert [each[0] for each in found] == parts


def test_data_parallel_copies(ranks):
    assert all(ranks.run(2, stored_expert_cases.data_parallel, recipe="blockwise"))


def test_half_of_the_bytes(ranks):
    for stored, plain in ranks.run(2, stored_expert_cases.bytes_of_a_forward, recipe="rowwise"):
        # Embeddings, norms and routers are gathered in bfloat16.
        assert stored < 0.65 * plain


def test_saved_loaded_and_reverted(ranks):
    assert all(ranks.run(2, stored_expert_cases.saved_and_changed, recipe="rowwise"))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("columns", "weights of experts that are stored in 8 bits are sharded over experts only"),
        ("number", "is stored in 8 bits, and FSDP2 cannot reshard such a weight to fewer ranks"),
        ("later", "they are sharded over ranks: convert the model before"),
    ],
)
def test_what_does_not_work_is_an_error(ranks, how, message):
    assert all(message in found for found in ranks.run(4, stored_expert_cases.refused, how=how))
