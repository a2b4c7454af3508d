"""Experts over all ranks beside tensor parallelism of the attention: a Qwen3-MoE of transformers, TP=2, EP=4."""

import pytest
import tp_expert_cases
from cases import each_recipe

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.one_in(3)]


def test_gradients_are_those_of_one_process(ranks):
    for expected, losses, off, stuck in ranks.run(4, tp_expert_cases.against_one_process, recipe="bf16", average=2):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert max(off.values()) < 1e-4, off
        assert stuck == []


def test_ranks_of_one_sequence_share_its_loss(ranks):
    """A control: divided by all ranks, gradients of experts are half of what they should be."""
    for *_, off, _ in ranks.run(4, tp_expert_cases.against_one_process, recipe="bf16", average=True):
        assert {name for name, x in off.items() if x > 0.4} == {name for name in off if "experts" in name}


@each_recipe
def test_losses(ranks, recipe):
    for expected, losses, _, stuck in ranks.run(4, tp_expert_cases.against_one_process, recipe=recipe, average=2):
        assert losses == pytest.approx(expected, rel=2e-3)
        assert stuck == []


@pytest.mark.multigpu
@each_recipe
def test_losses_on_gpus(gpus, recipe):
    """TP=2 and EP=2, over the same two."""
    for expected, losses, _, stuck in gpus.run(2, tp_expert_cases.against_one_process, recipe=recipe, average=1):
        assert losses == pytest.approx(expected, rel=5e-3)
        assert stuck == []
