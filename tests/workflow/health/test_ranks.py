"""monitor() and sensitivity() on sharded models."""

import health_cases
import pytest

PROCESSES = 2

pytestmark = pytest.mark.xdist_group("ranks")


# Compiled code reads weights after the gather, so one kind of gather is enough for it.
@pytest.mark.parametrize(("gather", "compiled"), [(False, False), (True, False), (True, True)])
def test_shards_of_fsdp2_are_monitored(ranks, gather, compiled):
    unchanged = ranks.run(2, health_cases.inspect_fsdp, gather=gather, compiled=compiled)
    assert unchanged == [[False, False]] * 2


def test_shards_of_tensor_parallelism_are_monitored(ranks):
    ranks.run(2, health_cases.inspect_tensor_parallel)


@pytest.mark.parametrize("way", ["experts", "fsdp"])
def test_sharded_experts_are_monitored(ranks, way):
    ranks.run(2, health_cases.inspect_experts, way=way)


@pytest.mark.parametrize("gather", [False, True])
def test_sensitivity_of_sharded_weights(ranks, gather):
    ranks.run(2, health_cases.sensitivity_fsdp, gather=gather)
