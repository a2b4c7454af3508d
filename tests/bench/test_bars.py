"""The bars of the benchmark: which rows meet them, and what is said where rows are missing."""

import dataclasses

import pytest
from bench_rows import LLAMA, gemm_rows

from bench import tables
from bench.contest.judge import HIGHEST, LOWEST, MEAN, Bar, judge

PAIR = Bar("pair", "gemm", "scaled_matmul", "rowwise", "tritonfp8 precise", "torch precise", 1.0, ("square",))


def judged(rows, **changes):
    (verdict,) = judge(rows, [dataclasses.replace(PAIR, **changes)])
    return verdict


@pytest.mark.parametrize(
    ("own", "changes", "measured", "holds"),
    [
        (2.0, {"bar": 1.5}, 1.5, True),
        (2.0, {"bar": 1.51}, 1.5, False),
        (2.0, {"bar": 1.5, "at_most": True, "reduce": HIGHEST}, 1.5, True),
        (2.0, {"bar": 1.49, "at_most": True, "reduce": HIGHEST}, 1.5, False),
        (2.0, {"quantity": "host time ratio", "bar": 0.7, "at_most": True}, 2 / 3, True),
        (14.0, {"quantity": "more seconds", "bar": 10, "at_most": True}, 11.0, False),
    ],
)
def test_a_bar_is_met_or_not(own, changes, measured, holds):
    verdict = judged(gemm_rows(LLAMA[0], own, 3.0), **changes)
    assert verdict.measured == pytest.approx(measured)
    assert verdict.holds is holds


def test_means_are_geometric_and_the_worst_shape_decides_where_each_has_to_do():
    rows = [*gemm_rows(LLAMA[0], 1.0, 4.0), *gemm_rows(LLAMA[1], 1.0, 1.0)]
    sets = ("square", "llama-8b")
    assert judged(rows, sets=sets, reduce=MEAN).measured == pytest.approx(2.0)
    assert judged(rows, sets=sets, reduce=LOWEST).measured == 1.0


def test_a_bar_on_a_part_of_its_shapes_is_not_met_yet():
    rows = gemm_rows(LLAMA[0], 1.0, 4.0)
    partly = {"sets": ("square", "llama-8b")}
    assert judged(rows, **partly, reduce=LOWEST).holds is None
    assert judged(rows, **partly, reduce=MEAN).holds is None
    # A shape that is too slow decides it all the same.
    assert judged(rows, **partly, reduce=LOWEST, bar=5.0).holds is False
    assert judged(rows, **partly, reduce=MEAN, bar=5.0).holds is None
    assert "8 not measured" in tables.bars_table([judged(rows, **partly)])


def test_every_case_of_a_bar_counts():
    rows = gemm_rows(LLAMA[0], 1.0, 4.0)
    others = [row | {"case": "tensorwise", "seconds": 1.0} for row in rows]
    several = {"case": ("rowwise", "tensorwise"), "bar": 1.5}
    verdict = judged([*rows, *others], **several, reduce=MEAN)
    assert (verdict.measured, verdict.expected, verdict.holds) == (pytest.approx(2.0), 2, True)
    assert judged([*rows, *others], **several).holds is False
    assert judged(rows, **several).holds is None


def test_a_shape_without_a_peer_is_left_out():
    rows = gemm_rows(LLAMA[0], 1.0, 2.0)
    own, peer = gemm_rows(LLAMA[1], 1.0, 2.0)
    peer |= {"seconds": None, "reason": "RuntimeError: not on this shape"}
    verdict = judged([*rows, own, peer], sets=("square", "llama-8b"))
    assert verdict.expected == 8
    assert len(verdict.values) == 1


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([], "not measured"),
        (gemm_rows(LLAMA[0], None, 3.0), "not measured"),
        ([r | {"seconds": None, "reason": "AssertionError: wrong"} for r in gemm_rows(LLAMA[0], 1.0, 3.0)],
         "not measured: AssertionError: wrong"),
    ],
)  # fmt: skip
def test_a_bar_without_data_says_so(rows, text):
    verdict = judged(rows)
    assert verdict.measured is None
    assert verdict.holds is None
    assert f"| {text} | not known |" in tables.bars_table([verdict])


def test_a_case_that_no_suite_has_is_not_built():
    assert judged([], case="RMSNorm + nothing").reason == "not built"
