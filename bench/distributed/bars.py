"""Bars of ``bench.distributed``: required ratios between rows of one run, as data, and the check of them."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from bench.contest.judge import Bar, Row, Verdict
from bench.distributed.models import (
    AGAIN,
    ALONE,
    BASELINE,
    GATHER,
    REORDERED,
    STORED,
    TORCHAO_GATHER,
    TORCHAO_ROWWISE,
    TP,
    TP_WAYS,
)
from tritonfp8 import recipes

GATHERED = "all_gather"
# Steps in which the order of sums has little effect on losses.
EARLY_STEPS = 10
SPEED, BYTES, DIFFERING, APART, AFTER, LOST, KEPT = (
    "speed-up",
    "all-gather ratio",
    "differing losses",
    "loss difference",
    "later loss difference",
    "lost losses",
    "bytes a parameter",
)


def _speed_up(row: Row, over: Row) -> float | None:
    seconds = row["seconds"], over["seconds"]
    return None if None in seconds else seconds[1] / seconds[0]


def gathered_ratio(row: Row, over: Row) -> float | None:
    """All-gathered bytes of a step over the bytes of the other row; None if a row has no count."""
    found = row["bytes"].get(GATHERED), over["bytes"].get(GATHERED)
    return found[0] / found[1] if None not in found and found[1] else None


def differing_losses(row: Row, over: Row) -> float | None:
    """Number of losses, over all steps and ranks, that differ in a bit; None if steps are missing."""
    losses, others = ([float(x) for rank in each["losses"] for x in rank] for each in (row, over))
    if not losses or len(losses) != len(others):
        return None
    return sum(x != y and not (math.isnan(x) and math.isnan(y)) for x, y in zip(losses, others, strict=True))


def loss_difference(row: Row, over: Row) -> float | None:
    """Largest difference of the mean losses of all ranks over the first steps; infinite if one is NaN."""
    pairs = zip(mean_losses(row)[:EARLY_STEPS], mean_losses(over)[:EARLY_STEPS], strict=False)
    return max((abs(x - y) if math.isfinite(x - y) else math.inf for x, y in pairs), default=None)


def later_loss_difference(row: Row, over: Row) -> float | None:
    """Difference of the mean losses of all ranks in the step after the first steps; infinite if one is NaN."""
    losses, others = mean_losses(row), mean_losses(over)
    if min(len(losses), len(others)) <= EARLY_STEPS:
        return None
    apart = abs(losses[EARLY_STEPS] - others[EARLY_STEPS])
    return apart if math.isfinite(apart) else math.inf


def lost_losses(row: Row, over: Row) -> float | None:
    """Number of losses that are NaN or infinite."""
    losses = [float(x) for rank in row["losses"] for x in rank]
    return sum(not math.isfinite(x) for x in losses) if losses else None


def kept_bytes(row: Row, over: Row) -> float | None:
    """Bytes of weight and optimizer state for each parameter of a linear layer."""
    found: float | None = row.get("bytes_a_linear_parameter")
    return found


def mean_losses(row: Row) -> list[float]:
    """The mean loss of all ranks in each step."""
    return [statistics.fmean(map(float, step)) for step in zip(*row["losses"], strict=True)]


QUANTITIES: dict[str, Callable[[Row, Row], float | None]] = {
    SPEED: _speed_up,
    BYTES: gathered_ratio,
    DIFFERING: differing_losses,
    APART: loss_difference,
    AFTER: later_loss_difference,
    LOST: lost_losses,
    KEPT: kept_bytes,
}
_RECIPES = [name for name in recipes.names() if recipes.get(name).output.quantized]
_BYTES_BAR, _LOSS_BAR = 0.52, 1e-3
# Bytes of weight and optimizer state for each parameter of a linear layer, by the format of the moments.
_STORED_BARS = {"bf16": 5.3, "fp8": 3.3}
_SPEED_BARS = {"tensorwise": (TORCHAO_GATHER, 1.0), "rowwise": (TORCHAO_ROWWISE, 1.10)}


def _bar(what: str, contender: str, over: str, bar: float, quantity: str, model: str | None = None) -> Bar:
    at_most = quantity != SPEED
    return Bar(
        what, "distributed", "distributed", "step", contender, over, bar, (), model, quantity=quantity, at_most=at_most
    )


def _gathers(recipe: str) -> list[Bar]:
    gather = f"{recipe}, {GATHER}"
    bars = [
        _bar(f"{gather}: bytes of all-gathers over bf16's", gather, BASELINE, _BYTES_BAR, BYTES),
        _bar(f"{gather}: losses that differ from those without it", gather, recipe, 0, DIFFERING),
    ]
    if recipe in _SPEED_BARS:
        peer, bar = _SPEED_BARS[recipe]
        # torchao gathers rowwise weights in bf16, so both of our gathers are compared with it.
        names = (recipe, gather) if peer == TORCHAO_ROWWISE else (gather,)
        bars += [_bar(f"{name}: speed over {peer}, 1b", name, peer, bar, SPEED, "1b") for name in names]
    return bars


def _stored(recipe: str) -> list[Bar]:
    bars = []
    for moments, most in _STORED_BARS.items():
        name, gather = f"{recipe}, {STORED}, {moments} moments", f"{recipe}, {GATHER}"
        bars += [
            _bar(f"{name}: bytes a linear parameter, 1b", name, name, most, KEPT, "1b"),
            _bar(f"{name}: speed over {gather}, 1b", name, gather, 1.0, SPEED, "1b"),
        ]
    return bars


def _apart(name: str, alone: str) -> Bar:
    what = f"{name}: largest difference from the losses of one process, {EARLY_STEPS} steps"
    return _bar(what, name, alone, _LOSS_BAR, APART)


def _after(name: str, alone: str) -> Bar:
    what = f"{name}: difference from the loss of one process after {EARLY_STEPS} steps"
    return _bar(what, name, alone, _LOSS_BAR, AFTER)


def _tensor_parallel(recipe: str) -> list[Bar]:
    first, *others = names = [f"{recipe}, {how}" for how in TP_WAYS]
    lost = [_bar(f"{name}: losses that are NaN or infinite", name, name, 0, LOST) for name in names]
    same = [_bar(f"{name}: losses that differ from those of {first}", name, first, 0, DIFFERING) for name in others]
    alone = f"{recipe}, {ALONE}"
    return [*lost, *same, *(_apart(name, alone) for name in names), *(_after(name, alone) for name in names)]


def _control(bar: Bar) -> Bar:
    """Mark a bar about bf16 or the order of sums: if it is missed, the bars of recipes say nothing about recipes."""
    return dataclasses.replace(bar, what=f"control: {bar.what}")


def _reordered(recipe: str) -> Bar:
    """Control: if it is missed, the order of sums by itself exceeds the bar of tensor parallelism."""
    return _control(_apart(f"{recipe}, {REORDERED}", f"{recipe}, {ALONE}"))


_again = _bar("losses of bf16 that differ when it runs again", f"{BASELINE}, {AGAIN}", BASELINE, 0, DIFFERING)
FSDP_BARS = (
    _control(_again),
    *itertools.chain.from_iterable(map(_gathers, _RECIPES)),
    *itertools.chain.from_iterable(map(_stored, _RECIPES)),
)
TP_BARS = (
    _control(_apart(f"{BASELINE}, {TP}", f"{BASELINE}, {ALONE}")),
    *map(_reordered, (BASELINE, *_RECIPES)),
    *itertools.chain.from_iterable(map(_tensor_parallel, _RECIPES)),
)


def judge(rows: Iterable[Row], run: Mapping[str, Any]) -> list[Verdict]:
    """The verdicts of the bars of FSDP, or of tensor parallelism, on the rows of a run.

    Args:
        rows: rows of :func:`bench.distributed.compare.row`.
        run: ``model``, ``device`` (``"cpu"`` or ``"cuda"``), ``tp`` and ``deterministic`` of the run.
    """
    found = {row["contender"]: row for row in rows}
    return [_judge(bar, found, run) for bar in (TP_BARS if run["tp"] > 1 else FSDP_BARS)]


def _judge(bar: Bar, found: Mapping[str, Row], run: Mapping[str, Any]) -> Verdict:
    names = (bar.contender, bar.over)
    reason = _obstacle(bar, run) or next((found[n]["reason"] for n in names if "reason" in found.get(n, ())), None)
    value = None
    if reason is None and all(name in found for name in names):
        value = QUANTITIES[bar.quantity](found[bar.contender], found[bar.over])
    values = () if value is None else (((), value),)
    return Verdict(bar, values, 1, reason or "not measured: no part of this run")


def _obstacle(bar: Bar, run: Mapping[str, Any]) -> str | None:
    """The reason why a run cannot decide a bar, or None."""
    if bar.shape not in (None, run["model"]):
        return f"not measured: this run is of {run['model']}"
    if bar.quantity == SPEED and run["device"] == "cpu":
        return "not measured: on a CPU speeds mean nothing"
    if bar.quantity == DIFFERING and not run["deterministic"]:
        return "not measured: torch's own backward passes may differ from run to run (--losses)"
    return None
