"""``python -m tests.architecture`` prints what breaks the rules of the package and its map in CONTRIBUTING.md."""

import sys

from docs import house

from . import RULES, modules_below, package, room_violations, total_violations, violations

found = [line for rule in RULES for line in violations(rule)] + room_violations(package()) + house.outdated()
found += total_violations(modules_below("tests", ("tests",)))
print("\n".join(found) or "all rules are kept")
sys.exit(bool(found))
