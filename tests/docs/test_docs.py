"""The pages in docs/ say what the code and its tests say."""

import math
import re

import pytest
import torch

from docs import build, coverage, traffic
from docs.coverage import Collected, Column
from tritonfp8 import recipes

PAGE = build.PAGE.read_text()
NAMED = sorted(set(re.findall(r"tests/[\w/]+\.py::[\w\[\]-]+", PAGE)))


@pytest.fixture(scope="module")
def collected():
    return coverage.collect(id.partition("::")[0] for id in NAMED)


def test_tables_are_those_of_the_tests(collected):
    begin, end = (PAGE.index(marker) for marker in (build.BEGIN, build.END))
    expected = coverage.table(coverage.COLUMNS, collected)
    assert PAGE[begin + len(build.BEGIN) : end].strip() == expected, "run python -m docs.build"


def test_every_test_that_is_named_exists(collected):
    existing = {name for id, _ in collected for name in (id, id.partition("[")[0])}
    assert len(NAMED) > 20
    assert not [name for name in NAMED if name not in existing]


def test_a_cell_without_a_test_is_an_error():
    column = Column("TP", ("tests/a.py::test_a",), otherwise={"bf16": ("in bf16", "tests/b.py::test_b")})
    tests = [Collected(f"tests/a.py::test_a[{name}]", (name,)) for name in recipes.names() if name != "bf16"]
    bf16 = Collected("tests/b.py::test_b[bf16]", ("bf16",))
    assert "| bf16 | in bf16 |" in coverage.table([column], [*tests, bf16])
    for missing in (tests, [*tests[1:], bf16]):
        with pytest.raises(ValueError, match="no test of"):
            coverage.table([column], missing)
    with pytest.raises(ValueError, match="no test of 'bf16' with 'TP' among those of: pytest tests/a.py::test_a"):
        coverage.table([column._replace(keyword="sequence")], [*tests, bf16])


def test_a_test_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match="not found"):
        coverage.collect(["tests/docs/test_docs.py::test_of_nothing"])


def test_figure_is_that_of_all_ways_and_recipes():
    text = build.FIGURE.read_text()
    for words in (*recipes.names(), *(way.name for way in traffic.WAYS), str(traffic.LAYER.n), "8 bits"):
        assert words in text


def counted(mesh, recipe, sizes):
    return {way.name: way.step(mesh, recipe, sizes) for way in traffic.WAYS}


# Blocks lie on one rank each, so that no amax of a block is reduced.
SIZES = traffic.Sizes(n=512, k=256, tokens=256)


def costs(name):
    """Bytes of codes and scales that the page states for the all-gathers of weights and of tokens."""
    n, k, m = SIZES
    recipe = recipes.get(name)
    if not recipe.output.quantized:
        return 2 * n * k, 2 * m * k
    weights = n * k + (n * k // 32 if recipe.output.rhs.scale_format == "e8m0" else 0)
    if not recipe.grad_weight.quantized:
        return weights, 2 * m * k
    if name == "tensorwise":
        return weights, m * k
    block = recipe.output.lhs.block[1]
    scales = {-1: 4 * m, 128: m * k // 128 * 4, 32: m * k // 32}[block]
    return weights, 2 * m * k + scales + (0 if block == -1 else scales)


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("recipe", recipes.names())
def test_bytes_are_those_that_the_page_states(ranks, recipe):
    found, other = ranks.run(2, counted, recipe=recipe, sizes=SIZES)
    assert found == other
    weights, tokens = costs(recipe)
    quantized = recipes.get(recipe).output.quantized
    for name in traffic.PASSES:
        gathered = {dtype: size for (kind, dtype), size in found["FSDP2"][name].items() if kind == "all_gather"}
        assert gathered == {torch.uint8 if quantized else torch.bfloat16: weights}
    sent = {kind: size for (kind, _), size in found["SP, colwise layer"]["forward"].items()}
    assert math.isclose(sent["all_gather"], tokens, abs_tol=64)
    amaxes = {"tensorwise": 1, "rowwise": 512 + 256, "rowwise_hp_grad_weight": 512 + 1, "blockwise": 8}.get(recipe, 0)
    reduced = sum(size for (kind, _), size in found["FSDP2"]["forward"].items() if kind == "all_reduce")
    assert reduced == 4 * amaxes
