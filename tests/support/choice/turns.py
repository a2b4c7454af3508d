"""Cases that take turns in CI, whose ten minutes do not hold all of them.

Of a test marked ``in_turn(n)`` CI runs one of n cases, and others every day. Marked are files whose tests have many
cases, each with its own recipe or option; ``in_turn(1)`` keeps a test or a case of such a file for every day: one
without which a fault of tests/support/faults would pass. Where the environment variable CI is not set, every case runs.
"""

import hashlib
import os
from collections import defaultdict
from datetime import date

DAY = "TESTS_DAY"
"""Names the environment variable that holds the number of the day, for the workers that the first process starts."""


def note_day():
    """Fix the day for this process and its children: at midnight they would choose different cases."""
    os.environ.setdefault(DAY, str(date.today().toordinal()))


def waiting(items):
    """The items whose turn is on another day. Of each test at least one case has its turn."""
    if "CI" not in os.environ:
        return []
    cases = defaultdict(list)
    for item in items:
        if mark := item.get_closest_marker("in_turn"):
            cases[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    today = int(os.environ[DAY])
    found = []
    for (_, turns), each in cases.items():
        # Mixed, or two options of two values each would always meet in the same pairs.
        mixed = sorted(each, key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
        turns = min(turns, len(mixed))
        found += [item for place, item in enumerate(mixed) if (place + today) % turns]
    return found
