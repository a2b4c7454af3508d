"""verify and verify_training on models that FSDP2 and tensor parallelism shard."""

import pytest
import verify_cases
from fsdp_cases import Setup

from tritonfp8.recipes import GEMMS

PROCESSES = 2

pytestmark = pytest.mark.xdist_group("ranks")


@pytest.mark.parametrize(
    "setup",
    [
        Setup(),
        Setup(enabled=False),
        Setup(recompute="yes"),
        Setup(param_dtype=None, reshard=False),
        Setup(compile="block"),
    ],
    ids=["gather_in_8_bits", "gather_values", "recompute", "float32_no_reshard", "compiled"],
)
def test_every_layer_of_an_fsdp2_model_is_seen(ranks, setup):
    for layers, others in ranks.run(2, verify_cases.verify, setup=setup):
        assert len(layers) == 2 * 7 + 1
        assert set(layers.values()) == {GEMMS}
        assert others == []


def test_a_gathered_weight_that_a_function_reads(ranks):
    for found in ranks.run(2, verify_cases.raw_read):
        assert found.keys() == {"b"}
        assert "its weight was multiplied by aten." in found["b"]


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_tensor_parallel_layers_count_their_local_gemms(ranks, recipe):
    for layers in ranks.run(2, verify_cases.tensor_parallel, recipe=recipe):
        assert layers == {name: dict.fromkeys(GEMMS, (1, 2 * 16 * 32 * 256 // 2)) for name in "02"}


@pytest.mark.parametrize("enabled", [False, True])
def test_a_step_on_shards_moves_every_weight(ranks, enabled):
    """Only rank 0 has rows of the embedding that change."""
    for moved, failures in ranks.run(2, verify_cases.step, setup=Setup(enabled=enabled)):
        assert failures == {}
        assert {"embed.weight", "last.weight", "layers.0.q.weight"} <= set(moved)


def test_a_shard_that_is_stuck_on_all_ranks(ranks):
    for moved, failures in ranks.run(2, verify_cases.step, setup=Setup(), spoil="zeros"):
        assert failures == {"last.weight": "it did not change: its gradient is all zeros"}
        assert "last.weight" not in moved


def test_an_optimizer_that_was_made_before_the_model_was_sharded(ranks):
    for _, failures in ranks.run(2, verify_cases.step, setup=Setup(), spoil="other"):
        assert failures.keys() == {"parameter 0 of group 0 of the optimizer", "embed.weight"}
