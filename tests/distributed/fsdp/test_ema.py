"""Weights that are swapped for their moving average and back, as EMA does: no evaluation and no step uses old ones."""

import functools
from dataclasses import replace

import covering
import ema_cases
import pytest
from cases import QUANTIZED
from fsdp_cases import Setup

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.in_turn(3)]
PROCESSES = 2


@pytest.fixture(scope="module")
def known(ranks):
    """Runs that several tests compare with, each made once."""

    @functools.cache
    def run(swap, setup, **options):
        return ranks.run(2, ema_cases.swapped, swap=swap, setup=setup, **options)

    return run


def check(ranks, known, swap, setup, once=False):
    """The losses, those of evaluations included, are those of FSDP2 alone, and of training without any evaluation."""
    on = ranks.run(2, ema_cases.swapped, swap=swap, setup=setup, once=once)
    off = known(swap, replace(setup, enabled=False), reshard=True)
    assert on == off
    # Plain FSDP2 trains on undisturbed, and a third run of compiled code would take seconds.
    if not setup.compile:
        undisturbed = known(None, setup, undisturbed=True)
        assert [run[:2] for run in on] == [run[:2] for run in undisturbed]
    for _, _, (before, average, after) in on:
        assert before == after
        assert all(a != b for a, b in zip(before, average, strict=True))


# A swap is seen before any recipe is read: the tests below have each swap with one of them.
@pytest.mark.parametrize(("swap", "recipe"), covering.each(list(ema_cases.SWAPS), QUANTIZED))
def test_evaluations_are_those_of_the_weights_that_were_swapped_in(ranks, known, swap, recipe):
    check(ranks, known, swap, Setup(recipe))


# With and without a block of quantize_weights_once around an evaluation, each swap with one of them.
@pytest.mark.parametrize(("swap", "once"), [*((swap, True) for swap in ema_cases.SWAPS), ("data_copy", False)])
def test_of_weights_that_fsdp2_leaves_gathered(ranks, known, swap, once):
    check(ranks, known, swap, Setup(reshard=False), once)


@pytest.mark.parametrize(
    "setup", [Setup(tied=True), Setup("tensorwise", compile="block"), Setup(offload=True)], ids=str
)
def test_options(ranks, known, setup):
    check(ranks, known, "data_copy", setup)


# Weights that FSDP2 reshards. The test above has weights that stay gathered, with each swap.
@pytest.mark.parametrize("swap", ["data_copy"])
def test_a_block_of_quantize_weights_once_for_each_set_of_weights(ranks, known, swap):
    check(ranks, known, swap, Setup(), once=True)


@pytest.mark.parametrize("swap", ema_cases.SWAPS)
def test_weights_stay_gathered_where_none_was_swapped(ranks, swap):
    for kept, changed in ranks.run(2, ema_cases.gathered_during, setup=Setup(), swap=swap):
        # Those of two blocks; after a swap, of the outermost module as well.
        assert (kept, changed) == (2, 3)


def test_swaps_that_cannot_work_are_errors(ranks):
    for run, words in {
        "assign": ("RuntimeError", "layers.1.down", "torch ignores", "param.data.copy_"),
        "gathered": ("NotImplementedError", "model.reshard()"),
        "inside": ("RuntimeError", "weights changed inside quantize_weights_once", "last"),
        "deepcopy": ("AssertionError", "FSDP does not support deepcopy"),
    }.items():
        for message in ranks.run(2, ema_cases.told, run=run):
            assert all(word in message for word in words), message


def test_other_changes_are_no_lost_assignment(ranks):
    for losses in ranks.run(2, ema_cases.not_assigned):
        assert len(set(losses)) == 1


def test_an_averaged_model_made_before_sharding_follows_the_recipes(ranks):
    on, off = (ranks.run(2, ema_cases.averaged, enabled=enabled) for enabled in (True, False))
    assert on == off
    losses, recipes, average, trained = on[0]
    assert set(recipes.values()) == {"tensorwise", "blockwise", "rowwise"}
    assert len(set(losses)) == len(losses)
    assert average != trained
