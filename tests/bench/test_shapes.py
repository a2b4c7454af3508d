import re

import pytest
import torch
from typer.testing import CliRunner

from bench import shapes, tune
from bench.contest import cases, gates
from tritonfp8 import recipes
from tritonfp8.recipes import GEMMS
from tritonfp8.specs import BLOCKS
from tritonfp8.specs.testing import assert_bitwise_equal
from tritonfp8.tuning import store
from tritonfp8.tuning.chooser import bucket
from tritonfp8.warmup.gemms import gemm_of
from tritonfp8.warmup.run import read_shapes

DIMS = {"gemm": 3, "cast": 2, "layer": 3, "model": 7, "grouped": 4, "experts": 5, "launch": 3, "first_step": 2}
BF16_BYTES = 2


def gemms(*names):
    return shapes.select("gemm", names)


@pytest.mark.parametrize("kind", shapes.SHAPES)
def test_shapes_of_each_kind(kind):
    """Sizes have the dims of their kind, none is measured twice, and there are default and tiny shapes."""
    sizes = [shape.size for shape in shapes.SHAPES[kind]]
    assert {len(size) for size in sizes} == {DIMS[kind]}
    assert min(map(min, sizes)) >= 1
    assert len(set(sizes)) == len(sizes)
    assert shapes.select(kind)
    tiny = shapes.select(kind, [shapes.SMOKE])
    assert tiny
    assert all(max(shape.size) <= 512 for shape in tiny)


def test_by_default_what_the_bars_are_about_is_measured():
    assert set(shapes.DEFAULT) <= set(shapes.set_names())
    assert set(shapes.LARGE_GEMMS) < {shape.set for shape in shapes.select("gemm")}
    assert shapes.SMOKE not in shapes.DEFAULT


def test_all_is_everything_but_smoke():
    for kind, found in shapes.SHAPES.items():
        assert shapes.select(kind, [shapes.ALL]) == [shape for shape in found if shape.set != shapes.SMOKE]


def test_an_unknown_set_is_refused_with_the_names_of_all():
    with pytest.raises(ValueError, match=r"no set of shapes is named llama; sets: square, llama-8b, .*or all"):
        shapes.select("gemm", ["llama"])


def test_forward_products_are_tuned_in_both_accumulations():
    ((m, n, k),) = (shape.size for shape in gemms(shapes.SMOKE))
    given = [call.named() for call in tune.calls_of([shapes.SMOKE], tune.VARIANTS, False)]
    assert {(*g["a"].shape, g["b"].shape[0]) for g in given} == {(m, k, n)}
    found = sorted((g["a_spec"].split(":")[1], g["accumulation"]) for g in given)
    assert found == [("1x128", "precise"), ("rowwise", "fast"), ("rowwise", "precise")]


def test_gemms_of_experts_are_tuned_for_few_and_many_tokens():
    ((tokens, experts, n, k),) = (shape.size for shape in shapes.select("grouped", [shapes.SMOKE]))
    calls = tune.grouped_calls_of([shapes.SMOKE], tune.VARIANTS)
    found = {gemm_of(call, torch.device("cpu")).key for call in calls}
    assert {at.experts for at in found} == {experts}
    rows = {(at.kind.family, at.kind.accumulation, at.kind.groups, at.n, at.k) for at in found}
    forward, backward, summed = (("rows", n, k), ("rows", k, n), ("columns", n, k))
    kinds = (("epilogue", "fast"), ("epilogue", "precise"), ("blockwise", "precise"))
    assert rows == {(*kind, *gemm) for kind in kinds for gemm in (forward, backward, summed)}
    assert {at.m for at in found} == {bucket(tokens // part // experts) for part in tune.PARTS}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "GEMMs: square.*none"), (["launch"], "got launch"), (["llama"], "no set"),
        (["--grouped"], "deepseek-v3.*none"),
    ],
)  # fmt: skip
def test_what_to_tune_has_to_be_said(names, message):
    result = CliRunner().invoke(tune.app, names)
    assert result.exit_code == 1
    assert re.search(message, str(result.exception) + result.output)


def test_shapes_that_nobody_tuned_are_in_no_table():
    """Not with the same N and K: the nearest M of those would serve, too."""
    untuned = {shape.size[1:] for shape in gemms("untuned", "drawn")}
    assert len(gemms("untuned")) == len(gemms("drawn")) == 10
    entries = [at for file in store.SHIPPED.glob("*.json") for at in store.read_shipped(file.stem)]
    assert entries
    assert not untuned & {(at.n, at.k) for at in entries}


def test_the_sets_are_what_the_bars_say_of_them():
    assert len(gemms(*shapes.BAR_GEMMS)) == 27
    for shape in shapes.select("cast", ["large"]):
        assert shape.size[0] * shape.size[1] * BF16_BYTES >= shapes.LARGE_CAST_BYTES
    tokens = {shape.size[0] for shape in gemms("decode")}
    assert (min(tokens), max(tokens)) == (1, 256)
    # torch._scaled_mm takes N and K that are multiples of 16 only.
    for shape in gemms(*shapes.LARGE_GEMMS, "untuned", "drawn", "decode", "hidden-1024", "hidden-2048"):
        assert all(size % 16 == 0 for size in shape.size[1:])
    for shape in (*gemms("odd"), *shapes.select("cast", ["odd"])):
        assert any(size % 128 for size in shape.size)


def test_projections_are_those_of_the_models():
    assert ("gate, up, 16384 tokens", (16384, 14336, 4096)) in [(s.name, s.size) for s in gemms("llama-8b")]
    for name, expected in {
        "llama-8b": {(4096, 1024, 4096), (16384, 4096, 14336)},
        "llama-70b": {(4096, 8192, 28672), (16384, 1024, 8192)},
        "deepseek-v3": {(4096, 24576, 1536), (4096, 7168, 2048)},
    }.items():
        assert {shape.size for shape in gemms(name)} >= expected


# Bytes an element of bf16.
BYTES = {
    "rowwise": 3, "rowwise transposed": 5, "rowwise both": 6, "1x128": 3, "1x128 both": 4, "128x128": 3,
    "tensorwise": 5, "tensorwise both": 6, "1x32": 3, "1x32 both": 4,
}  # fmt: skip
CASTS = cases.CASTS


def test_bytes_that_must_move():
    assert {cast.name: cast.moved_bytes((10, 1), BF16_BYTES) / 10 for cast in CASTS} == BYTES


@pytest.mark.parametrize("case", CASTS, ids=str)
def test_casts_compute_what_they_are_compared_with(case):
    x = torch.randn(256, 384, dtype=torch.bfloat16)
    inputs = case.inputs(x)
    actual, expected, plain = case.run(*inputs), case.expected(*inputs), case.plain(*inputs)
    assert case.takes_whole_blocks(x.shape)
    assert_bitwise_equal(actual, expected)
    # Torch divides a number by a tensor in two steps: its scale is a bit off at times, and an element in many.
    for data, e in zip(plain[::2], expected[::2], strict=True):
        gates.nearly_same_bytes(e)((data,))
    for scale, e in zip(plain[1::2], expected[1::2], strict=True):
        torch.testing.assert_close(scale, e.float(), rtol=1e-6, atol=0)


def test_plain_casts_take_whole_blocks_only_and_cover_every_block():
    whole = {case.name: case.takes_whole_blocks((130, 256)) for case in CASTS}
    names = ("128x128", "1x128 both", "1x128", "rowwise both")
    assert [whole[name] for name in names] == [False, False, True, True]
    assert {spec.block for c in CASTS for spec in (c.spec, c.spec_t) if spec} == set(BLOCKS)


def test_variants_differ_in_accumulation_alone():
    variants = cases.recipe_variants(cases.LAYER_RECIPES)
    assert [name for name in variants if name.endswith("fast")] == ["rowwise fast", "tensorwise fast"]
    fast, precise = variants["rowwise fast"], recipes.get("rowwise")
    for gemm in GEMMS:
        assert getattr(fast, gemm).accumulation == "fast"
        assert getattr(fast, gemm).lhs == getattr(precise, gemm).lhs
    assert variants["rowwise precise"] is precise


def test_work_of_a_product():
    assert cases.gemm_flops(2, 3, 5) == 60
    assert cases.gemm_bytes(2, 3, 5) == 2 * 5 + 3 * 5 + 2 * 2 * 3


def test_products_are_printed_as_warmup_reads_them(tmp_path):
    file = tmp_path / "shapes.json"
    file.write_text(shapes.as_json(["decode"]))
    assert set(read_shapes(file)) == {shape.size for shape in gemms("decode")}
    assert len(read_shapes(file)) == len(gemms("decode"))
    assert shapes.as_json([]) == shapes.as_json(shapes.TUNED)
