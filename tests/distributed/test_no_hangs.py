"""A rank that fails, dies or skips a layer: no other waits for it for longer than the process group's timeout."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import fsdp_limit_cases
import pytest
import tp_model_cases
from process_group import Processes, RankError

pytestmark = pytest.mark.xdist_group("ranks")

GROUP_TIMEOUT, PATIENCE = 8, 60
WAYS = {"FSDP2": fsdp_limit_cases.fail_on_rank_1, "sequence parallel": tp_model_cases.fail_on_rank_1}
ENDS = {"raise": "bad batch", "kill": "rank 1: the process ended", "skip": "Timed out"}


def end(processes, how, way):
    """The error of the ranks after one gives up, and the seconds until then."""
    begin = time.monotonic()
    with pytest.raises(RankError) as error:
        processes.run(2, WAYS[way], how=how, after_error=PATIENCE)
    return str(error.value), time.monotonic() - begin


@pytest.fixture(scope="module")
def ended():
    """How each case ends. All at once, each in processes of its own: they do little but wait."""
    started = {case: Processes(2, group_timeout=GROUP_TIMEOUT) for case in itertools.product(ENDS, WAYS)}
    try:
        for (_, way), processes in started.items():
            processes.run(2, WAYS[way], how="nothing")
        with ThreadPoolExecutor(len(started)) as threads:
            futures = {case: threads.submit(end, processes, *case) for case, processes in started.items()}
        yield futures
    finally:
        for processes in started.values():
            processes.stop()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ENDS)
def test_no_rank_waits_for_ever(ended, how, way):
    error, seconds = ended[how, way].result()
    assert seconds < PATIENCE
    # Each ended by itself, the first by an error of its collective.
    assert "rank 0 of 2: " in error
    assert ENDS[how] in error
    assert "nothing within" not in error
