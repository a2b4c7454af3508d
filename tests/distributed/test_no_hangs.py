"""A rank that fails, dies or skips a layer: no other waits for it for longer than the process group's timeout."""

import ctypes
import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from cases import normal
from fsdp_cases import Setup, build, tokens_of
from process_group import Processes, RankError
from tp_cases import converted_mlp, sequence_plan_mlp

pytestmark = pytest.mark.xdist_group("ranks")

GROUP_TIMEOUT, PATIENCE = 8, 60


def give_up(how):
    if how == "raise":
        raise ValueError("bad batch")
    if how == "kill":
        os._exit(1)


def sharded_by_fsdp(mesh, how):
    """A step in which rank 1 fails or skips a layer."""
    model, _ = build(mesh, Setup())
    model(tokens_of(0)).backward()
    if mesh.get_local_rank() == 1:
        give_up(how)
        if how == "skip":
            del model.layers[1]
    model(tokens_of(0)).item()


def sequence_parallel(mesh, how):
    """A step in which rank 1 fails or skips the layers."""
    model = converted_mlp(mesh, "rowwise", sequence_plan_mlp())
    x = normal(32, 64).chunk(2)[mesh.get_local_rank()].requires_grad_()
    model(x).sum().backward()
    if mesh.get_local_rank() == 1:
        give_up(how)
        if how == "skip":
            return
    model(x).sum().item()


WAYS = {"FSDP2": sharded_by_fsdp, "sequence parallel": sequence_parallel}
ENDS = {"raise": "bad batch", "kill": "rank 1: the process ended (exit code 1)", "skip": "Timed out"}


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


def read_address_zero(mesh):
    ctypes.string_at(0)


def worlds(mesh):
    return mesh.size()


def test_the_error_of_a_crash_names_signal_and_line():
    processes = Processes(1)
    try:
        with pytest.raises(RankError, match=r"rank 0: the process ended \(SIGSEGV\)(?s:.)*in read_address_zero"):
            processes.run(1, read_address_zero)
        # Others take its place.
        assert processes.run(1, worlds) == [1]
    finally:
        processes.stop()
