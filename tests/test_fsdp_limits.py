"""FSDP2 with FP8 all-gather where things go wrong or unusual ways: nothing hangs, and errors say what to do."""

import time

import fsdp_limit_cases
import pytest
from process_group import Processes, RankError

pytestmark = pytest.mark.xdist_group("ranks")

GROUP_TIMEOUT = 8


@pytest.fixture(scope="module")
def ranks():
    processes = Processes(4)
    yield processes
    processes.stop()


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_empty_batch_and_empty_shards_on_some_ranks(ranks, recipe):
    on, off = (ranks.run(4, fsdp_limit_cases.train_with_empty_batch, enabled=e, recipe=recipe) for e in (True, False))
    assert on == off


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_reshard_that_changes_between_micro_batches(ranks, recipe):
    on, off = (ranks.run(2, fsdp_limit_cases.toggle_reshard, enabled=e, recipe=recipe) for e in (True, False))
    assert on == off


def test_explicit_unshard_and_prefetch(ranks):
    on, off = (ranks.run(2, fsdp_limit_cases.unshard_first, enabled=e) for e in (True, False))
    assert on == off


def test_error_inside_forward(ranks):
    assert ranks.run(2, fsdp_limit_cases.raise_inside_forward) == [True] * 2


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
        "once": ("TypeError", "Sharded"),
        "float": ("TypeError", "values of a weight that FSDP gathered in 8 bits"),
        "decay": ("TypeError", "model.reshard()"),
        "autocast": ("TypeError", "param_dtype"),
        "columns": ("ValueError", "dim 0"),
        "above": ("RuntimeError", "outermost"),
        "late": ("ValueError", "before fully_shard"),
        "tensor parallel twice": ("ValueError", "enable_float8_all_gather once"),
        "tensor parallel last": ("ValueError", "parallelize_module before"),
        "repr": ("GatheredWeight", "bfloat16"),
    }.items():
        assert all(word in told[what] for word in words), told[what]


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_no_rank_waits_for_ever_for_one_that_failed(how):
    processes = Processes(2, group_timeout=GROUP_TIMEOUT)
    try:
        processes.run(2, fsdp_limit_cases.fail_on_rank_1, how="nothing")
        begin = time.monotonic()
        with pytest.raises(RankError) as error:
            processes.run(2, fsdp_limit_cases.fail_on_rank_1, how=how, after_error=60)
        assert time.monotonic() - begin < 60
        # Both ended by themselves, the first by an error of its collective.
        assert "rank 0 of 2: " in str(error.value)
        assert "nothing within" not in str(error.value)
        assert ("bad batch" if how == "raise" else "the process ended") in str(error.value)
    finally:
        processes.stop()


def test_layer_that_one_rank_skips_ends_in_an_error_in_time():
    processes = Processes(2, group_timeout=GROUP_TIMEOUT)
    try:
        processes.run(2, fsdp_limit_cases.fail_on_rank_1, how="nothing")
        begin = time.monotonic()
        with pytest.raises(RankError):
            processes.run(2, fsdp_limit_cases.fail_on_rank_1, how="skip", after_error=60)
        assert time.monotonic() - begin < 60
    finally:
        processes.stop()
