"""A rank that fails, dies or skips a layer: no other waits for it for longer than the process group's timeout."""

import time

import fsdp_limit_cases
import pytest
import tp_model_cases
from process_group import Processes, RankError

pytestmark = pytest.mark.xdist_group("ranks")

GROUP_TIMEOUT, PATIENCE = 8, 60
WAYS = {"FSDP2": fsdp_limit_cases.fail_on_rank_1, "sequence parallel": tp_model_cases.fail_on_rank_1}
ENDS = {"raise": "bad batch", "kill": "rank 1: the process ended", "skip": "Timed out"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ENDS)
def test_no_rank_waits_for_ever(how, way):
    processes = Processes(2, group_timeout=GROUP_TIMEOUT)
    try:
        processes.run(2, WAYS[way], how="nothing")
        begin = time.monotonic()
        with pytest.raises(RankError) as error:
            processes.run(2, WAYS[way], how=how, after_error=PATIENCE)
        assert time.monotonic() - begin < PATIENCE
        # Each ended by itself, the first by an error of its collective.
        assert "rank 0 of 2: " in str(error.value)
        assert ENDS[how] in str(error.value)
        assert "nothing within" not in str(error.value)
    finally:
        processes.stop()
