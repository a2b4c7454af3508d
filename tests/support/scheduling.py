"""Groups and order of tests for pytest-xdist: long tests start first.

A long test that starts last would keep all other workers idle.
"""

import functools
import re
from pathlib import Path

import pytest
from xdist.scheduler import LoadGroupScheduling

# Files in the order in which they begin: before all others, whose tests take a few seconds at most. The first stands
# for all of its group, which one worker runs while the other compiles kernels, a file of tests/compile_only at a time.
FIRST = (
    "distributed/fsdp/test_fsdp_tp.py",
    "kernels/test_compile_only.py",
    "launch/test_plan.py",
    "clients/test_torchtitan.py",
    "clients/test_trainer.py",
    "notebooks/test_notebooks.py",
    "distributed/tensor_parallel/test_tensor_parallel.py",
    "bench/test_report.py",
    "training/test_loop.py",
    "warmup/test_run.py",
    "layers/linear/test_compile.py",
    "cli/test_app.py",
    "cli/test_train.py",
)
TESTS = Path(__file__).resolve().parents[1]


def order(item):
    """Sort key of a test."""
    name = item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""
    return FIRST.index(name) if name in FIRST else len(FIRST)


@functools.cache
def group_of(path):
    """The ``xdist_group`` of a file, or None."""
    found = re.search(r'xdist_group\("(.+?)"\)', Path(path).read_text())
    return found and found[1]


class Scheduling(LoadGroupScheduling):
    """Groups of files by the mark ``xdist_group``, in the order of collection.

    Workers report names of tests, not marks. xdist appends groups to these names, which pytest 9.2 does not allow: all
    tests were silently distributed one by one.
    """

    def __init__(self, config, log=None):
        super().__init__(config, log)
        self._root = config.rootpath
        # xdist would sort groups by number of tests, which is not their duration.
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid):
        """The unit of distribution: a group of files, or one test."""
        return group_of(self._root / nodeid.partition("::")[0]) or nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return Scheduling(config, log) if config.getvalue("dist") == "loadgroup" else None
