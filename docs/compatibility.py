"""What docs/compatibility.md lists: features, and the tests that show for each recipe whether they work.

A new recipe or feature needs no other entry: cells are made from the tests, and those without one say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from docs.coverage import Collected, Column, collect, matrix
from docs.features import CLIENTS, GRAPHS, ONE_PROCESS, SHARDED

GROUPS: Mapping[str, Sequence[Column]] = {
    "one process": ONE_PROCESS,
    "graphs": GRAPHS,
    "many ranks": SHARDED,
    "clients": CLIENTS,
}
"""The features of each table of the page, in order."""


def files() -> Iterator[str]:
    """The files of all tests that the page names: collected whole, so that one id may be part of another."""
    for columns in GROUPS.values():
        for column in columns:
            for test in column.functions:
                yield test.partition("::")[0]


def check(collected: Sequence[Collected]) -> None:
    """Every test that the page names exists.

    Raises:
        ValueError: one does not, with the feature that names it.
    """
    existing = set()
    for test in collected:
        function = test.id.partition("[")[0]
        existing |= {test.id, function, function.rpartition("::")[0]}
    for columns in GROUPS.values():
        for column in columns:
            for test in column.functions:
                if test not in existing:
                    raise ValueError(f"{column.name!r} names a test that does not exist: {test}")


def table(group: str, collected: Sequence[Collected]) -> str:
    """The tables of a group. Features are numbered through the page."""
    first = 1
    for name, columns in GROUPS.items():
        if name == group:
            return matrix(columns, collected, first)
        first += len(columns)
    raise ValueError(f"group must be one of {list(GROUPS)}; got {group!r}")


def current() -> list[Collected]:
    """The tests of now."""
    found = collect(files())
    check(found)
    return found
