"""docs/compatibility.md says what the tests show, in every cell."""

import re

import pytest

from docs import build, compatibility, coverage
from docs.coverage import Collected, Column
from tritonfp8 import recipes

PAGE = (build.DOCS / "compatibility.md").read_text()
# One worker collects the tests for all of these.
pytestmark = pytest.mark.xdist_group("compatibility")
COLUMNS = [column for columns in compatibility.GROUPS.values() for column in columns]
CELLS = re.compile(r"yes|yes, on a GPU|no: .+|untested|in bf16")


@pytest.fixture(scope="module")
def collected():
    return build.collected()


@pytest.mark.parametrize("group", compatibility.GROUPS)
def test_page_is_up_to_date(collected, group):
    block = build.blocks(PAGE)[f"compatibility {group}"]
    assert compatibility.table(group, collected) in block, "run python -m docs.build"


def test_every_recipe_has_a_word_about_every_feature():
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if re.match(r"\| \d+ \| (?!`pytest)", line)]
    assert [int(row[0]) for row in rows] == list(range(1, len(COLUMNS) + 1))
    for row, column in zip(rows, COLUMNS, strict=True):
        assert row[1] == column.name
        assert len(row) == 2 + len(recipes.names())
        assert all(CELLS.fullmatch(text) for text in row[2:]), row
        assert "untested" not in row or column.known
    assert len({column.name for column in COLUMNS}) == len(COLUMNS)


def test_lost_tests_fail(collected):
    """Each test that the page names is missed if it is removed or renamed."""
    for id in {test for column in COLUMNS for test in column.functions}:
        rest = [test for test in collected if not test.id.startswith(id)]
        with pytest.raises(ValueError, match="names a test that does not exist"):
            compatibility.check(rest)


def test_a_test_that_loses_a_recipe_changes_the_page(collected):
    name = "tests/ops/test_flops.py::test_of_forward_and_backward"
    rest = [test for test in collected if not (test.id.startswith(name) and "mxfp8" in test.recipes)]
    with pytest.raises(ValueError, match="no test of 'mxfp8' with 'FlopCounterMode'"):
        compatibility.table("graphs", rest)
    name = "tests/layers/linear/test_compile.py::test_odd_numbers_of_tokens_take_no_graph_of_their_own"
    rest = [test for test in collected if not (test.id.startswith(name) and "bf16" in test.recipes)]
    assert compatibility.table("graphs", rest) != compatibility.table("graphs", collected)


def test_cells():
    """A cell is "yes" by a parameter or by a test that names the recipe, and untested only with a word about it."""
    tests = [
        Collected("t.py::test_a[rowwise]", frozenset({"rowwise"})),
        Collected("t.py::test_b", frozenset(), frozenset({"mxfp8"})),
        Collected("t.py::test_c", frozenset()),
        Collected("t.py::test_gpu[rowwise]", frozenset({"rowwise"}), gpu=True),
    ]
    column = Column("x", ("t.py::test_a",), fixed={"mxfp8": "t.py::test_b"}, known="Words.")
    found = {name: coverage.cell(column, name, tests) for name in ("rowwise", "mxfp8", "blockwise")}
    assert found == {"rowwise": "yes", "mxfp8": "yes", "blockwise": "untested"}
    with pytest.raises(ValueError, match="no test of 'blockwise'"):
        coverage.cell(column._replace(known=""), "blockwise", tests)
    with pytest.raises(ValueError, match="no test of 'blockwise'"):
        coverage.cell(column._replace(fixed={"blockwise": "t.py::test_b"}), "blockwise", tests)
    always = Column("x", always=("t.py::test_c",), answer="no: `ValueError`")
    assert {coverage.cell(always, name, tests) for name in recipes.names()} == {"no: `ValueError`"}
    gpu = Column("x", ("t.py::test_gpu",), known="Words.")
    assert [coverage.cell(gpu._replace(gpu=value), "rowwise", tests) for value in (False, True)] == ["untested", "yes"]


def test_recipes_are_those_that_a_test_runs(collected):
    """By a parameter, by a table of cases that a parameter chooses from, or in the code of the test and its helpers."""
    of = {test.id: test for test in collected}
    assert of["tests/distributed/fsdp/test_fsdp.py::test_option[recompute_mxfp8]"].recipes == {"mxfp8"}
    assert of["tests/distributed/fsdp/test_fsdp.py::test_option[offload]"].recipes == {"rowwise"}
    assert of["tests/clients/test_trainer.py::test_trainer[tied_float32]"].recipes == {"rowwise_hp_grad_weight"}
    scheduled = of["tests/clients/test_callback.py::test_the_schedule_follows_the_steps_of_the_trainer"]
    assert not scheduled.recipes
    assert "rowwise" in scheduled.words
    assert "mxfp8" not in scheduled.words
