"""Pipeline stages of converted layers: the bits of the model that is not cut into stages."""

import functools

import pipeline_cases
import pytest
import torch
from cases import QUANTIZED

from tritonfp8 import recipes
from tritonfp8.specs.testing import assert_bitwise_equal

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.in_turn(3)]

SCHEDULES = list(pipeline_cases.SCHEDULES)


@pytest.fixture(scope="module")
def check_equal_to_one_process(ranks):
    @functools.cache
    def in_one_process(count, recipe):
        return ranks.run(1, pipeline_cases.in_one_process, count=count, recipe=recipe)[0]

    def check(count, recipe, **options):
        losses, grads = in_one_process(count, recipe)
        found = ranks.run(count, pipeline_cases.pipelined, recipe=recipe, **options)
        assert found[-1][0] == losses
        assert [list(step) for step in zip(*(of_stage for _, of_stage in found), strict=True)] == grads

    return check


@pytest.mark.parametrize("recipe", recipes.names())
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_stages(check_equal_to_one_process, schedule, recipe):
    check_equal_to_one_process(2, recipe, schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_stages(check_equal_to_one_process, schedule):
    check_equal_to_one_process(4, "rowwise", schedule=schedule)


@pytest.mark.parametrize("recipe", recipes.names())
def test_weights_quantized_once_for_all_micro_batches(check_equal_to_one_process, recipe):
    check_equal_to_one_process(2, recipe, schedule="1f1b", held=True)


# A schedule orders the micro-batches. Recipes differ there only in whether scales are gathered.
GATHERED = [*(("1f1b", name) for name in QUANTIZED), ("gpipe", "rowwise")]


@pytest.mark.parametrize(("schedule", "recipe"), GATHERED)
def test_fp8_all_gather_inside_stages_changes_no_bit(ranks, schedule, recipe):
    on, off = (ranks.run(4, pipeline_cases.pipelined_shards, recipe=recipe, schedule=schedule, enabled=e)
               for e in (True, False))  # fmt: skip
    assert on == off
    assert on[2][0] != on[3][0] != [[], []]


def test_sharded_stage_quantizes_once(ranks):
    for plain, once in ranks.run(2, pipeline_cases.held_shards):
        assert_bitwise_equal(torch.cat(once), torch.cat(plain))
