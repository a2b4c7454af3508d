"""Markdown tables of the measured rows."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.contest.judge import Verdict

Row = Mapping[str, Any]
HOLDS = {True: "yes", False: "**no**", None: "not known"}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table; vertical bars in cells are escaped."""
    lines = [[cell.replace("|", r"\|") for cell in line] for line in (header, ["---"] * len(header), *rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def size_name(size: Iterable[int]) -> str:
    """A size as text, such as ``4096x4096x14336``."""
    return "x".join(map(str, size))


def seconds_text(seconds: float) -> str:
    """Seconds as text, in s, ms or us."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e6:.4g} us"


def rate_text(row: Row) -> str:
    """TFLOP/s if the row counts FLOPs, TB/s if it counts only bytes, else empty."""
    for key, unit in (("flops", "TFLOP/s"), ("bytes", "TB/s")):
        if key in row:
            return f"{row[key] / row['seconds'] / 1e12:.4g} {unit}"
    return ""


def with_peers(rows: Iterable[Row]) -> list[tuple[Row, Row | None]]:
    """Each row with the row of its peer on the same shape, or None."""
    rows = list(rows)
    found = {_key(row, row["contender"]): row for row in rows}
    return [(row, found.get(_key(row, row["peer"]))) for row in rows]


def _key(row: Row, contender: str | None) -> tuple[Any, ...]:
    return row["suite"], row["case"], tuple(row["shape"]), contender


def over_peer(row: Row, peer: Row | None) -> float | None:
    """Speed over the peer. If both rows count bytes, compares bytes per second."""
    if peer is None or row["seconds"] is None or peer["seconds"] is None:
        return None
    work = row["bytes"] / peer["bytes"] if "bytes" in row and "bytes" in peer else 1.0
    return work * peer["seconds"] / row["seconds"]


def bars_table(verdicts: Iterable[Verdict]) -> str:
    """Table of the bars: subject, bar, measured value, and whether the bar is met."""
    return table(
        ("what", "bar", "measured", "holds"),
        (
            (v.bar.what, f"{'<=' if v.bar.at_most else '>='} {v.bar.bar:g}", _measured(v), HOLDS[v.holds])
            for v in verdicts
        ),
    )


def _measured(verdict: Verdict) -> str:
    if verdict.measured is None:
        return verdict.reason or "not measured"
    text = f"{verdict.measured:.3f}"
    if verdict.expected > 1:
        worst = (max if verdict.bar.at_most else min)(verdict.values, key=lambda each: each[1])
        text += f" {verdict.bar.reduce} of {len(verdict.values)} shapes, {worst[1]:.3f} at {size_name(worst[0])}"
    missing = verdict.expected - len(verdict.values)
    return f"{text}; {missing} not measured" if missing else text


def means_table(rows: Iterable[Row]) -> str:
    """Geometric mean, lowest and highest speed over the peer, by case and set."""
    groups: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for row, peer in with_peers(rows):
        if (ratio := over_peer(row, peer)) is not None:
            groups[row["suite"], row["case"], row["set"], row["contender"], row["peer"]].append(ratio)
    return table(
        ("suite", "case", "set", "contender", "over", "geometric mean", "lowest", "highest", "shapes"),
        (
            (*key, *(f"{f(ratios):.3f}" for f in (statistics.geometric_mean, min, max)), str(len(ratios)))
            for key, ratios in groups.items()
        ),
    )


def rows_table(rows: Iterable[Row]) -> str:
    """All rows of a suite: time, rate, speed over the peer, and peak memory with its ratio to the peer's; or the
    reason why there is no time.
    """
    return table(
        ("case", "shape", "contender", "time", "rate", "over its peer", "peak memory", "note"),
        (_line(row, peer) for row, peer in with_peers(rows)),
    )


def _memory_text(row: Row, peer: Row | None) -> str:
    if "peak_bytes" not in row:
        return ""
    text = f"{row['peak_bytes'] / 2**30:.3g} GiB"
    return f"{text}, {row['peak_bytes'] / peer['peak_bytes']:.3f} x" if peer and peer.get("peak_bytes") else text


def _line(row: Row, peer: Row | None) -> tuple[str, ...]:
    ratio = over_peer(row, peer)
    measured = row["seconds"] is not None
    return (
        row["case"],
        f"{size_name(row['shape'])} ({row['name']})",
        row["contender"],
        seconds_text(row["seconds"]) if measured else "",
        rate_text(row) if measured else "",
        "" if ratio is None else f"{ratio:.3f} x {row['peer']}",
        _memory_text(row, peer),
        row.get("reason", ""),
    )
