"""The bars of the distributed benchmark: which rows meet them, and what is shown where losses differ."""

import math

import pytest
from cases import QUANTIZED
from rich.console import Console

from bench.distributed import bars as distributed_bars
from bench.distributed import run as distributed
from bench.distributed.bars import FSDP_BARS, TP_BARS, judge
from bench.distributed.models import REORDERED, tp_contestants

RUN = {"model": "1b", "device": "cuda", "tp": 1, "deterministic": True}


def row(contender, seconds=1.0, losses=((3.0, 2.0), (3.5, 2.5)), gathered=100, **fields):
    return {
        "contender": contender, "over": "bf16", "own": True, "seconds": seconds, "peak_bytes": None,
        "bytes": {"all_gather": gathered}, "losses": [list(rank) for rank in losses], **fields,
    }  # fmt: skip


def verdicts(*rows, **run):
    return {v.bar.what: v for v in judge(rows, {**RUN, **run})}


def test_every_bar_is_not_known_without_rows():
    for tp, bars in ((1, FSDP_BARS), (2, TP_BARS)):
        found = verdicts(tp=tp)
        assert len(found) == len(bars)
        assert {(v.holds, v.measured, v.reason) for v in found.values()} == {
            (None, None, "not measured: no part of this run")
        }


@pytest.mark.parametrize(("gathered", "holds"), [(52, True), (53, False)])
def test_bar_of_bytes(gathered, holds):
    found = verdicts(row("bf16"), row("rowwise, FP8 all-gather", gathered=gathered))
    assert found["rowwise, FP8 all-gather: bytes of all-gathers over bf16's"].holds is holds


@pytest.mark.parametrize(
    ("recipe", "peer", "seconds", "holds"),
    [
        ("rowwise", "torchao rowwise", 1.11, True),
        ("rowwise", "torchao rowwise", 1.09, False),
        ("tensorwise", "torchao tensorwise, FP8 all-gather", 1.0, True),
        ("tensorwise", "torchao tensorwise, FP8 all-gather", 0.99, False),
    ],
)
def test_bars_of_speed(recipe, peer, seconds, holds):
    rows = row(f"{recipe}, FP8 all-gather"), row(peer, seconds)
    what = f"{recipe}, FP8 all-gather: speed over {peer}, 1b"
    assert verdicts(*rows)[what].holds is holds
    assert verdicts(*rows, model="160m")[what].reason == "not measured: this run is of 160m"
    assert verdicts(*rows, device="cpu")[what].reason == "not measured: on a CPU speeds mean nothing"
    missing = row(peer, None, reason="not measured: torchao is not installed")
    assert verdicts(rows[0], missing)[what].reason == "not measured: torchao is not installed"


@pytest.mark.parametrize(
    ("losses", "differing"),
    [
        (((3.0, 2.0), (3.5, 2.5)), 0),
        (((3.0, 2.0), (3.5, math.nextafter(2.5, 3))), 1),
        (((3.0, "nan"), (3.5, 2.5)), 1),
        # Not of all steps.
        (((3.0,), (3.5,)), None),
    ],
)
def test_bar_of_equal_losses(losses, differing):
    rows = row("rowwise"), row("rowwise, FP8 all-gather", losses=losses)
    what = "rowwise, FP8 all-gather: losses that differ from those without it"
    assert verdicts(*rows)[what].measured == differing
    assert verdicts(*rows)[what].holds is (None if differing is None else differing == 0)
    assert "may differ from run to run" in verdicts(*rows, deterministic=False)[what].reason


def shown_table(rows):
    """The table of results as text, with the losses compared."""
    distributed.compare_losses(rows)
    console = Console(width=250)
    with console.capture() as shown:
        console.print(distributed.results_table(rows, "title", True))
    return shown.get()


def test_differing_losses_are_shown():
    rows = [row("rowwise"), row("rowwise, FP8 all-gather", losses=((3.0, 2.0), (3.5, 2.6)))]
    for each in rows:
        each["tokens_per_second"] = 1.0
    assert "LOSSES DIFFER" in shown_table(rows)
    assert rows[1]["losses_equal_without"] is False


@pytest.mark.parametrize(
    ("losses", "lost", "apart"),
    [
        (((3.0, 2.0), (3.5, 2.5)), True, True),
        (((3.0, 2.0), (3.5, 2.5 + 1e-3)), True, True),
        (((3.0, 2.0), (3.5, 2.5 + 3e-3)), True, False),
        (((3.0, "nan"), (3.5, 2.5)), False, False),
    ],
)
def test_bars_of_tensor_parallelism(losses, lost, apart):
    found = verdicts(row("rowwise, TP", losses=losses), row("rowwise, one process"), tp=2)
    assert found["rowwise, TP: losses that are NaN or infinite"].holds is lost
    assert found["rowwise, TP: largest difference from the losses of one process, 10 steps"].holds is apart


@pytest.mark.parametrize(("moved", "holds"), [(0.0, True), (1e-7, False)])
@pytest.mark.parametrize("way", ["FP8 styles", "DTensors between layers"])
def test_bar_of_equal_losses_in_every_way(way, moved, holds):
    rows = row("rowwise, TP"), row(f"rowwise, TP, {way}", losses=((3.0, 2.0), (3.5, 2.5 + moved)))
    what = f"rowwise, TP, {way}: losses that differ from those of rowwise, TP"
    assert verdicts(*rows, tp=2)[what].holds is holds
    assert verdicts(*rows, tp=2, deterministic=False)[what].holds is None


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
@pytest.mark.parametrize(("moved", "holds"), [(0.0, True), (1e-3, True), (3e-3, False), (math.nan, False)])
def test_control_of_tensor_parallelism(recipe, moved, holds):
    rows = row(f"{recipe}, one process"), row(f"{recipe}, {REORDERED}", losses=((3.0, 2.0), (3.5, 2.5 + moved)))
    what = f"control: {recipe}, {REORDERED}: largest difference from the losses of one process, 10 steps"
    found = verdicts(*rows, tp=2)
    assert found[what].holds is holds
    assert [v.bar.what for v in found.values() if v.holds is not None] == [what]
    # Not one process of another recipe.
    assert verdicts(row("tensorwise, one process"), rows[1], tp=2)[what].holds is None


def test_differences_from_one_process_are_shown():
    names = ("bf16, TP", f"bf16, {REORDERED}", "bf16, one process", f"rowwise, {REORDERED}")
    rows = [row(name, None, losses=((3.0 + index / 4,),)) for index, name in enumerate(names)]
    shown = shown_table(rows)
    assert [each.get("loss_difference") for each in rows] == [0.5, 0.25, None, None]
    notes = {name: next(x for x in shown.splitlines() if f"│ {name} " in x) for name in names}
    assert "within 0.5 of one process at first" in notes[names[0]]
    assert "within 0.25 of one process at first" in notes[names[1]]
    assert not any("of one process at first" in notes[name] for name in names[2:])


def test_later_steps_may_drift_apart():
    early = [3.0] * distributed_bars.EARLY_STEPS
    rows = row("rowwise, TP", losses=[[*early, 9.0]]), row("rowwise, one process", losses=[[*early, 3.0]])
    assert distributed_bars.loss_difference(*rows) == 0


@pytest.mark.parametrize(("after", "holds"), [(3.0005, True), (3.002, False), (math.nan, False), (None, None)])
def test_bar_of_the_loss_after_the_first_steps(after, holds):
    """Of the step that follows them, whatever the first ones were; one run of ten steps has no such loss."""
    losses = [9.0] * distributed_bars.EARLY_STEPS + ([] if after is None else [after, 5.0])
    alone = [3.0] * len(losses)
    found = verdicts(row("rowwise, TP", losses=[losses]), row("rowwise, one process", losses=[alone]), tp=2)
    assert found["rowwise, TP: difference from the loss of one process after 10 steps"].holds is holds


def test_bars_of_tensor_parallelism_are_about_contestants():
    names = {c.name for c in tp_contestants(QUANTIZED, alone=True)}
    assert {name for bar in TP_BARS for name in (bar.contender, bar.over)} == names
    controls = {bar.contender: (bar.over, bar.bar) for bar in TP_BARS if bar.what.startswith("control: ")}
    controls.pop("bf16, TP")
    assert controls == {f"{name}, {REORDERED}": (f"{name}, one process", 1e-3) for name in ("bf16", *QUANTIZED)}
