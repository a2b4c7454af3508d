"""The pages in docs/ say what the code and its tests say."""

import math
import re

import pytest
import torch

from docs import build, coverage, traffic
from docs.coverage import Collected, Column
from docs.measured import decision, results
from tritonfp8 import recipes

PAGE = (build.DOCS / "distributed.md").read_text()
NAMED = sorted(set(re.findall(r"tests/[\w/]+\.py::[\w\[\]-]+", PAGE)))


@pytest.fixture(scope="module")
def collected():
    return coverage.collect(id.partition("::")[0] for id in NAMED)


def test_table_of_recipes_is_that_of_the_tests(collected):
    expected = coverage.table(coverage.COLUMNS, collected).strip()
    assert expected in build.blocks(PAGE)["coverage"], "run python -m docs.build"


@pytest.mark.parametrize("name", [name for name in build.BLOCKS if name != "coverage" and "compatibility" not in name])
def test_every_block_is_what_the_code_and_the_data_give(name):
    """No figure is typed by hand: a block that nobody has made since its data changed fails."""
    pages = [page for page in build.PAGES if name in build.blocks(page.read_text())]
    assert len(pages) == 1
    block = build.blocks(pages[0].read_text())[name]
    assert build.made(block) == block, "run python -m docs.build"
    assert build.BLOCKS[name]().strip() in block


def test_a_block_that_was_changed_by_hand_is_made_again():
    page = (build.DOCS / "benchmarks.md").read_text()
    assert build.made(page) == page
    assert build.made(page.replace("| 77.8 dB |", "| 99.9 dB |")) == page
    assert "99.9 dB" in page.replace("| 77.8 dB |", "| 99.9 dB |")


def test_predicted_tokens_are_those_of_the_filter():
    """The least tokens of the page are the least that `filter="auto"` converts."""
    cost, least = decision.cost, decision.first_tokens("rowwise", (4096, 4096))
    why = [cost.why_slower(recipes.get("rowwise"), m, (4096, 4096), torch.device("meta")) for m in (least // 2, least)]
    assert why[0] is not None
    assert why[1] is None
    assert decision.first_tokens("rowwise", (1024, 1024)) is None


def test_pages_have_known_blocks_and_links_to_files_and_readme_is_short():
    for page in build.PAGES:
        text = page.read_text()
        assert text.count("<!-- begin ") == text.count("<!-- end ") == len(build.blocks(text))
        for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{page.name}: {link}"
    assert len((build.ROOT / "README.md").read_text().splitlines()) <= 130


def test_every_test_that_is_named_exists(collected):
    existing = {name for test in collected for name in (test.id, test.id.partition("[")[0])}
    assert len(NAMED) > 20
    assert not [name for name in NAMED if name not in existing]


def test_a_cell_without_a_test_is_an_error():
    column = Column("TP", ("tests/a.py::test_a",), otherwise={"bf16": ("in bf16", "tests/b.py::test_b")})
    tests = [Collected(f"tests/a.py::test_a[{name}]", frozenset({name})) for name in recipes.names() if name != "bf16"]
    bf16 = Collected("tests/b.py::test_b[bf16]", frozenset({"bf16"}))
    assert "| bf16 | in bf16 |" in coverage.table([column], [*tests, bf16])
    for missing in (tests, [*tests[1:], bf16]):
        with pytest.raises(ValueError, match="no test of"):
            coverage.table([column], missing)
    with pytest.raises(ValueError, match="no test of 'bf16' with 'TP' in: pytest tests/a.py::test_a"):
        coverage.table([column._replace(keyword="sequence")], [*tests, bf16])


def test_a_test_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match="not found"):
        coverage.collect(["tests/docs/test_docs.py::test_of_nothing"])


def test_figures_name_what_they_show():
    """All ways and recipes, each room, and the speeds that were measured."""
    of_shapes = [x[shape] for x in results.speed_ups("model", "model").values() for shape in results.MODELS.values()]
    for figure, words in {
        "distributed": [*recipes.names(), *(way.name for way in traffic.WAYS), str(traffic.LAYER.n), "8 bits"],
        "house": build.house.purposes(),
        "speed_ups": [f"{speed:.2f}" for speed in of_shapes],
    }.items():
        text = (build.DOCS / f"{figure}.svg").read_text()
        assert all(word in text for word in words), figure


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
    sent = found["SP, colwise layer"]["forward"].items()
    assert math.isclose(sum(size for (kind, _), size in sent if kind == "all_gather"), tokens, abs_tol=64)
    amaxes = {"tensorwise": 1, "rowwise": 512 + 256, "rowwise_hp_grad_weight": 512 + 1, "blockwise": 8}
    amaxes = {**amaxes, "mxfp4_weights": 512 + 256}.get(recipe, 0)
    # The check that ranks gather alike, 16 bytes of int64, is the same for any weight.
    reduced = found["FSDP2"]["forward"].get(("all_reduce", torch.int32), 0)
    assert reduced == 4 * amaxes
