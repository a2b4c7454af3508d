"""FSDP2 with FP8 all-gather where things go wrong or unusual ways: nothing hangs, and errors say what to do."""

import functools

import fsdp_cases
import fsdp_limit_cases
import pytest
from cases import QUANTIZED
from fsdp_cases import Setup

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.in_turn(3)]


def check_resharded_and_not(ranks, function, recipe, both=True):
    """Plain FSDP2 gives the same bits whether it reshards or not, so it runs once."""
    off = ranks.run(2, function, enabled=False, recipe=recipe, reshard=True)
    for reshard in (True, False) if both else (True,):
        assert ranks.run(2, function, enabled=True, recipe=recipe, reshard=reshard) == off


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_empty_batch_and_empty_shards_on_some_ranks(ranks, recipe):
    on, off = (ranks.run(4, fsdp_limit_cases.train_with_empty_batch, enabled=e, recipe=recipe) for e in (True, False))
    assert on == off


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_layers_that_share_a_weight(ranks, recipe):
    (on, gathered), (off, _) = (
        ranks.run(3, fsdp_limit_cases.train_tied, enabled=e, recipe=recipe)[0] for e in (True, False)
    )
    assert on == off
    # Weights, not layers.
    assert gathered == 2
    assert len(set(on[0])) == 3


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_reshard_that_changes_between_micro_batches(ranks, recipe):
    on, off = (ranks.run(2, fsdp_limit_cases.toggle_reshard, enabled=e, recipe=recipe) for e in (True, False))
    assert on == off


def test_explicit_unshard_and_prefetch(ranks):
    on, off = (ranks.run(2, fsdp_limit_cases.unshard_first, enabled=e) for e in (True, False))
    assert on == off


def test_error_inside_forward(ranks):
    assert ranks.run(2, fsdp_limit_cases.raise_inside_forward) == [True] * 2


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_scales_of_an_interrupted_forward_are_not_used_for_weights_that_changed(ranks, recipe):
    on, off = (ranks.run(2, fsdp_limit_cases.interrupt_inside_forward, enabled=e, recipe=recipe) for e in (True, False))
    assert on == off


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_training_after_a_first_forward_in_inference_mode(ranks, recipe):
    check_resharded_and_not(ranks, fsdp_limit_cases.inference_first, recipe)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_autocast_without_a_mixed_precision_policy(ranks, recipe):
    # Without resharding both orientations are gathered at once: of recipes that read one, and that read two.
    both = recipe in ("rowwise", "blockwise")
    check_resharded_and_not(ranks, fsdp_limit_cases.in_autocast, recipe, both)


@pytest.mark.parametrize("how", ["rounding", "format", "swapped later"])
def test_ranks_that_disagree_on_a_recipe_are_told_which_and_where(ranks, how):
    told = ranks.run(3, fsdp_limit_cases.disagree, how=how)
    assert told[0] == told[1] == told[2]
    layer, others = ("layers.0.q", "blockwise") if how == "swapped later" else ("layers.1.up", "tensorwise")
    line = next(line for line in told[0].splitlines() if layer in line)
    assert "ranks disagree" in told[0]
    assert "on ranks 0, 2" in line
    assert "on ranks 1" in line
    assert others in line
    assert len(told[0].splitlines()) == 2


@pytest.mark.in_turn(1)
# Recipes that reduce amaxes and mxfp8, which reduces none; one that gathers nothing in 8 bits; no recipe at all.
@pytest.mark.parametrize(
    ("world", "options", "words"),
    [
        (2, {"how": "blockwise"}, "recipe 'blockwise'"),
        (2, {"how": "tensorwise", "first": "mxfp8"}, "recipe 'tensorwise'"),
        (3, {"how": "bf16"}, "weight in high precision"),
        (2, {"how": "rowwise", "first": "blockwise"}, "recipe 'rowwise'"),
        (2, {"how": "reverted"}, "not gathered"),
        # Some ranks share neither shards nor copies with the one that changed.
        (4, {"how": "bf16", "first": "mxfp8", "copies": 2}, "weight in high precision"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_a_rank_that_changes_its_recipe_alone(ranks, world, options, words):
    told = ranks.run(world, fsdp_limit_cases.changes_alone, **options, timeout=30)
    assert all(each == told[0] for each in told)
    # The next forward says it again, until ranks agree.
    assert len(told[0]) == 2
    line = next(line for line in told[0][1].splitlines() if "layers.0.q" in line)
    assert "ranks disagree" in told[0][1]
    assert f"on ranks {', '.join(str(rank) for rank in range(world) if rank != 1)}" in line
    assert line.rstrip(";").count(words) == 1
    assert f"{words}" in next(part for part in line.split(";") if "on ranks 1" in part)


@pytest.mark.parametrize("reshard", [True, False])
def test_copies_of_parameters_after_an_evaluation_are_those_of_plain_fsdp2(ranks, reshard, tmp_path):
    options = {"path": str(tmp_path), "reshard": reshard}
    on, off = (
        ranks.run(3, fsdp_limit_cases.copies_after_evaluation, enabled=enabled, **options) for enabled in (True, False)
    )
    assert on == off


def test_a_revert_that_fails_leaves_the_gather_as_it_was(ranks):
    assert ranks.run(2, fsdp_limit_cases.revert_that_fails) == [(15, True)] * 2


def test_revert_of_a_sharded_model(ranks):
    assert ranks.run(2, fsdp_limit_cases.revert_sharded) == [(True, True)] * 2


def test_errors_say_what_to_do(ranks):
    told, other = (
        {**more, **told}
        for more, told in zip(
            ranks.run(2, fsdp_limit_cases.order_errors), ranks.run(2, fsdp_limit_cases.errors), strict=True
        )
    )
    assert told.keys() == other.keys()
    for what, words in {
        "once": ("ValueError", "blocks do not nest"),
        "float": ("NotImplementedError", "values of a weight that FSDP gathered in 8 bits"),
        "decay": ("NotImplementedError", "model.reshard()"),
        "autocast": ("NotImplementedError", "around the call of the model"),
        "columns": ("ValueError", "dim 0"),
        "above": ("RuntimeError", "outermost"),
        "tensor parallel twice": ("ValueError", "enable_float8_all_gather once"),
        "repr": ("GatheredWeight", "bfloat16"),
    }.items():
        assert all(word in told[what] for word in words), told[what]


@pytest.fixture(scope="module")
def cast_alone(ranks):
    """Runs with shards cast one by one. Options change none of their bits on a CPU, so each recipe has one."""
    return functools.cache(lambda recipe: ranks.run(2, fsdp_cases.train, setup=Setup(recipe), steps=2))


GROUPED = {"eager": {}, "together": {"reshard": False}, "compiled": {"compile": "whole"}}


# The hooks that cast are not compiled: one recipe shows it.
@pytest.mark.parametrize(
    ("recipe", "how"), [("rowwise", how) for how in GROUPED] + [("tensorwise", "eager"), ("tensorwise", "together")]
)
def test_shards_that_ops_cast_together(ranks, cast_alone, recipe, how):
    options = GROUPED[how]
    grouped = ranks.run(2, fsdp_limit_cases.train_grouped, setup=Setup(recipe, **options), steps=2)
    for expected, (trained, called) in zip(cast_alone(recipe), grouped, strict=True):
        assert trained == expected
        # One call a forward for all amaxes.
        assert called["amax_of_shards"] == 2
        assert called["quantize_shards"] > 0
