"""The cases that CI runs, whose ten minutes do not hold all of them.

Of a test or a file marked ``one_in(n)`` CI runs one of n cases, which a hash of the commit chooses: a commit that is
green stays green. Where a change may have broken a test file (``changes``), CI runs every case of it. Marked are files
that take long, and tests with many cases, each with its own recipe or option; ``one_in(1)`` keeps a test or a case of
such a file for every commit: one without which a fault of tests/support/faults would pass. Where the environment
variable CI is not set, and by ``make nightly``, every case runs.
"""

import functools
import hashlib
import os
from collections import defaultdict

import changes
import pytest

COMMIT, BASE = "TESTS_COMMIT", "TESTS_BASE"
"""Environment variables: the commit that chooses, and the commit since which files count as changed.

The first process sets them for its workers, in which a new commit would choose other cases.
"""


def note_commit():
    """Fix the commit for this process and its children. Without git no commit chooses: all cases run."""
    if COMMIT not in os.environ:
        commit = changes.git("rev-parse", "HEAD") or ""
        os.environ[COMMIT] = commit
        os.environ.setdefault(BASE, (commit and changes.base_of(commit)) or "")


def number():
    """A number that depends on the commit, for other choices; 0 without git."""
    return int(os.environ.get(COMMIT) or "0", 16)


def is_on():
    """Whether this run leaves out cases: in CI, where the history since the base is known."""
    return "CI" in os.environ and bool(os.environ.get(COMMIT)) and bool(os.environ.get(BASE))


@functools.cache
def _changed(base):
    return changes.changed_files(base)


def left_out(items):
    """The items that this run leaves out. Of each marked test, and of each marked file, at least one case runs."""
    if not is_on():
        return []
    cases = defaultdict(list)
    affected = {}
    for item in items:
        for node, mark in item.iter_markers_with_node("one_in"):
            file = item.nodeid.partition("::")[0]
            if file not in affected:
                # A file outside of the project has no path in it.
                affected[file] = bool(file) and changes.is_affected(file, _changed(os.environ[BASE]))
            if not affected[file]:
                marked = file if isinstance(node, pytest.Module) else item.nodeid.partition("[")[0]
                cases[marked, mark.args[0]].append(item)
            # The nearest mark counts.
            break
    return [item for (marked, share), each in cases.items() for item in _others(marked, share, each)]


def _others(marked, share, cases):
    """The cases that are not chosen. They are mixed, or two options of two values each would always meet in pairs."""
    mixed = sorted(cases, key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
    share = min(share, len(mixed))
    chosen = int.from_bytes(hashlib.sha256(f"{os.environ[COMMIT]} {marked}".encode()).digest()[:8])
    return [item for place, item in enumerate(mixed) if (place + chosen) % share]


def header():
    """What chose the cases, for the first lines of a run; None where all run."""
    if not is_on():
        return None
    return f"cases: by commit {os.environ[COMMIT][:12]}, and every case of what changed since {os.environ[BASE][:12]}"
