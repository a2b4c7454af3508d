"""Judge rows of a run by bars: required ratios between rows, as data.

``bars.md`` is written from :func:`judge`. A bar over a set of shapes is met if all of them were measured and meet it.
The verdict counts shapes that were not measured.
"""

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench import shapes
from bench.contest import cases, grouped

Row = Mapping[str, Any]
MEAN, LOWEST, HIGHEST = "geometric mean", "lowest", "highest"
_REDUCE: dict[str, Callable[[Sequence[float]], float]] = {MEAN: statistics.geometric_mean, LOWEST: min, HIGHEST: max}


def _rate(row: Row) -> float:
    return row["bytes"] / row["seconds"]


MORE, EXTRA = "more seconds", "extra launches"
# Name -> function of a row and the row that it is compared with, and the field that both rows need.
QUANTITIES: dict[str, tuple[Callable[[Row, Row], float], str]] = {
    "speed-up": (lambda row, over: over["seconds"] / row["seconds"], "seconds"),
    "share of copy speed": (lambda row, over: _rate(row) / _rate(over), "seconds"),
    "host time ratio": (lambda row, over: row["seconds"] / over["seconds"], "seconds"),
    "microseconds": (lambda row, over: 1e6 * row["seconds"], "seconds"),
    MORE: (lambda row, over: row["seconds"] - over["seconds"], "seconds"),
    "peak memory ratio": (lambda row, over: row["peak_bytes"] / over["peak_bytes"], "peak_bytes"),
    EXTRA: (lambda row, over: row["extra_launches"], "extra_launches"),
}


@dataclass(frozen=True)
class Bar:
    """One requirement.

    Attributes:
        what: description.
        kind: kind of the shapes (:mod:`bench.shapes`).
        suite, case, contender: select the rows; of several cases every shape is one of its own.
        over: the contender that they are compared with.
        bar: the smallest value allowed, or the largest if ``at_most``.
        sets: sets of the shapes.
        shape: name of a single shape of these sets, or None for all.
        quantity: a key of :data:`QUANTITIES`.
        reduce: how the values of all shapes become one.
    """

    what: str
    kind: str
    suite: str
    case: str | tuple[str, ...]
    contender: str
    over: str
    bar: float
    sets: tuple[str, ...]
    shape: str | None = None
    quantity: str = "speed-up"
    reduce: str = LOWEST
    at_most: bool = False

    @property
    def cases(self) -> tuple[str, ...]:
        """The cases of the bar."""
        return (self.case,) if isinstance(self.case, str) else self.case

    def sizes(self) -> list[tuple[int, ...]]:
        """The shapes of the bar."""
        return [s.size for s in shapes.select(self.kind, self.sets) if self.shape in (None, s.name)]


@dataclass(frozen=True)
class Verdict:
    """The measurement of a bar.

    Attributes:
        bar: the bar.
        values: ``(size, value)`` of each measured shape of each case.
        expected: number of shapes of all cases, without shapes on which the peer cannot run.
        reason: text for the table if nothing was measured.
    """

    bar: Bar
    values: tuple[tuple[tuple[int, ...], float], ...]
    expected: int
    reason: str

    @property
    def measured(self) -> float | None:
        """The reduced value, which is compared with the bar; None if nothing was measured."""
        return _REDUCE[self.bar.reduce]([value for _, value in self.values]) if self.values else None

    @property
    def holds(self) -> bool | None:
        """Whether the bar is met; None if too few shapes were measured to know."""
        if self.measured is None:
            return None
        met = self.measured <= self.bar.bar if self.bar.at_most else self.measured >= self.bar.bar
        # If every shape must meet the bar, one failure decides, and a missing shape might be that failure.
        complete = len(self.values) == self.expected
        return met if complete or (not met and self.bar.reduce != MEAN) else None


def judge(rows: Iterable[Row], bars: Sequence[Bar]) -> list[Verdict]:
    """The verdict of each bar on the rows."""
    found = {(r["suite"], r["case"], tuple(r["shape"]), r["contender"]): r for r in rows}
    return [_judge(bar, found) for bar in bars]


def _judge(bar: Bar, found: Mapping[tuple[Any, ...], Row]) -> Verdict:
    function, needed = QUANTITIES[bar.quantity]
    places = list(itertools.product(bar.cases, bar.sizes()))
    values, reasons, expected = [], [], len(places)
    for case, size in places:
        row, over = (found.get((bar.suite, case, size, name), {}) for name in (bar.contender, bar.over))
        reasons += [each["reason"] for each in (row, over) if "reason" in each]
        if row.get(needed) is not None and over.get(needed) is not None:
            values.append((size, function(row, over)))
        elif row.get(needed) is not None and "reason" in over:
            # The peer cannot run on this shape.
            expected -= 1
    absent = "not measured" if known_cases().issuperset(bar.cases) else "not built"
    reason = f"not measured: {reasons[0]}" if reasons else absent
    return Verdict(bar, tuple(values), expected, reason)


def known_cases() -> set[str]:
    """Names of the cases of all suites."""
    ops = (*cases.CASTS, *cases.GEMM_CASES, cases.EPILOGUE, *grouped.PRODUCTS, *grouped.CASTS)
    return {case.name for case in (*ops, *cases.CALLS, *cases.WHOLE, *grouped.OF_EXPERTS)}
