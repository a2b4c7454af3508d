"""FSDP2 with FP8 all-gather where things go wrong or unusual ways: nothing hangs, and errors say what to do."""

import fsdp_limit_cases
import pytest
from cases import QUANTIZED
from process_group import Processes

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def ranks():
    processes = Processes(4)
    yield processes
    processes.stop()


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
