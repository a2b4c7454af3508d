"""Recipes are data: they compare, hash, print and round-trip; and their docstrings say what their specs say."""

import copy
import dataclasses
import json
import re
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import gemms, specs
from strategies import recipes as any_recipe

from tritonfp8 import recipes
from tritonfp8.recipes import GEMMS, OPERANDS, Gemm, Recipe, recipe_of
from tritonfp8.specs import (
    BLOCK_1X32,
    BLOCK_1X128,
    BLOCK_128X128,
    BLOCKS,
    MXFP4,
    ROWWISE,
    TENSORWISE,
    QuantSpec,
    transposed,
)

ROW = QuantSpec("e4m3", ROWWISE, "fp32", "pow2")
VECTOR = QuantSpec("e4m3", BLOCK_1X128, "fp32", "pow2")
SQUARE = QuantSpec("e4m3", BLOCK_128X128, "fp32", "pow2")
MX = QuantSpec("e4m3", BLOCK_1X32, "e8m0", "pow2")
NAMES = ["bf16", "tensorwise", "rowwise", "rowwise_hp_grad_weight", "blockwise", "mxfp8", "mxfp4_weights"]
ROUND_TRIPS = {
    "dict": (Recipe.to_dict, Recipe.from_dict),
    "json": (Recipe.to_json, Recipe.from_json),
    "toml": (Recipe.to_toml, Recipe.from_toml),
}


class TestGemm:
    def test_both_operands_or_neither(self):
        assert not Gemm().quantized
        assert Gemm(ROW, ROW).quantized
        for operands in ({"lhs": ROW}, {"rhs": ROW}):
            with pytest.raises(ValueError, match=r"both operands quantized or neither; got lhs=.* and rhs="):
                Gemm(**operands)

    @given(specs(), specs())
    def test_operands_must_be_of_one_family(self, lhs, rhs):
        if BLOCKS[lhs.block].family == BLOCKS[rhs.block].family:
            assert Gemm(lhs, rhs).lhs is lhs
        else:
            with pytest.raises(ValueError, match="no kernel multiplies"):
                Gemm(lhs, rhs)

    def test_precise_is_the_default(self):
        assert Gemm().accumulation == Gemm(ROW, ROW).accumulation == "precise"
        assert Gemm(ROW, ROW, "fast") != Gemm(ROW, ROW)
        with pytest.raises(ValueError, match="accumulation must be one of 'precise', 'fast'; got 'exact'"):
            Gemm(ROW, ROW, "exact")

    @pytest.mark.parametrize("operand", ["e4m3", {"format": "e4m3"}, Gemm()])
    def test_operands_are_specs(self, operand):
        with pytest.raises(TypeError, match="lhs must be a QuantSpec or None; got"):
            Gemm(operand, ROW)

    @given(gemms())
    def test_round_trips(self, gemm):
        assert Gemm.from_dict(gemm.to_dict()) == gemm
        assert Gemm.from_dict(json.loads(json.dumps(gemm.to_dict()))) == gemm


class TestRecipe:
    @given(any_recipe(), st.sampled_from(list(ROUND_TRIPS)))
    def test_round_trips(self, recipe, form):
        write, read = ROUND_TRIPS[form]
        twin = read(write(recipe))
        assert twin == recipe
        assert hash(twin) == hash(recipe)
        assert str(twin) == str(recipe)

    @given(any_recipe())
    def test_what_is_written_is_readable_by_others(self, recipe):
        assert json.loads(recipe.to_json()) == recipe.to_dict()
        assert tomllib.loads(recipe.to_toml()) == recipe.to_dict()

    @given(any_recipe())
    def test_an_op_finds_the_products_in_its_args(self, recipe):
        assert dataclasses.replace(recipe_of(*recipe.args), name=recipe.name) == recipe

    @given(any_recipe(), any_recipe())
    def test_equality_is_that_of_the_fields(self, a, b):
        fields = [(r.name, r.output, r.grad_input, r.grad_weight) for r in (a, b)]
        assert (a == b) == (fields[0] == fields[1])
        assert a != a.to_dict()

    @given(any_recipe(), st.sampled_from(GEMMS), gemms())
    def test_replace_makes_a_variant_and_leaves_the_original(self, recipe, name, gemm):
        before = recipe.to_dict()
        variant = dataclasses.replace(recipe, **{name: gemm})
        assert getattr(variant, name) == gemm
        assert all(getattr(variant, other) == getattr(recipe, other) for other in GEMMS if other != name)
        assert recipe.to_dict() == before
        assert (variant == recipe) == (gemm == getattr(recipe, name))

    @given(any_recipe(), st.sampled_from(["name", *GEMMS]))
    def test_is_frozen(self, recipe, field):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(recipe, field, getattr(recipe, field))
        with pytest.raises(dataclasses.FrozenInstanceError):
            recipe.output.accumulation = "fast"

    @given(any_recipe())
    def test_copies_are_the_recipe_itself(self, recipe):
        assert copy.deepcopy({"a": [recipe]})["a"][0] is recipe

    @given(any_recipe())
    def test_plain_data_is_a_copy(self, recipe):
        before = hash(recipe)
        data = recipe.to_dict()
        data["output"]["accumulation"] = "?"
        for operand in ("lhs", "rhs"):
            data["output"].get(operand, {"block": []})["block"].clear()
        assert hash(recipe) == before
        assert recipe.to_dict() != data

    @given(any_recipe())
    def test_the_share_is_the_fraction_of_quantized_gemms(self, recipe):
        assert recipe.quantized_share == sum(getattr(recipe, gemm).lhs is not None for gemm in GEMMS) / 3

    def test_defaults_to_high_precision(self):
        assert Recipe("plain").quantized_share == 0
        assert Recipe.from_dict({"name": "plain"}) == Recipe("plain")
        assert Recipe.from_json('{"name": "r", "output": {"lhs": {}, "rhs": {}}}').output == Gemm(
            QuantSpec(), QuantSpec()
        )

    @pytest.mark.parametrize("name", ["", None, 3, b"rowwise"])
    def test_a_name_is_a_str(self, name):
        with pytest.raises(TypeError, match="non-empty str; got"):
            Recipe(name)

    @pytest.mark.parametrize("gemm", [None, ROW, {"lhs": None}, "bf16"])
    def test_gemms_are_gemms(self, gemm):
        with pytest.raises(TypeError, match=r"grad_input must be a recipes.Gemm; got (NoneType|QuantSpec|dict|str)"):
            Recipe("r", grad_input=gemm)

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ({}, "needs a 'name'; got the keys"),
            (
                {"name": "r", "outputs": {}},
                "has the keys name, output, grad_input, grad_weight, transposed_from, weights; got 'outputs' as well",
            ),
            ({"name": "r", "output": {"left": {}}}, "has the keys lhs, rhs, accumulation, batch_invariant; got 'left'"),
            ({"name": "r", "output": {"lhs": {"dtype": "e4m3"}}}, "got 'dtype' as well"),
            ({"name": "r", "output": []}, "GEMM must be a mapping .* got list"),
            ({"name": "r", "output": {"lhs": "e4m3", "rhs": {}}}, "spec must be a mapping .* got str"),
            ({"name": "r", "output": {"lhs": {}}}, "both operands quantized or neither"),
            (
                {"name": "r", "output": {"lhs": {}, "rhs": {"block": [1, 128]}}},
                "no kernel multiplies tensorwise by 1x128",
            ),
            ({"name": "r", "output": {"lhs": {"format": "e3m4"}, "rhs": {}}}, "format must be one of"),
            ("rowwise", "recipe must be a mapping .* got str"),
            ([], "got list"),
        ],
    )
    def test_bad_data_is_a_value_error(self, data, message):
        with pytest.raises(ValueError, match=message):
            Recipe.from_dict(data)
        with pytest.raises(ValueError, match=message):
            Recipe.from_json(json.dumps(data))

    @pytest.mark.parametrize("block", [128, [1, 128, 1], "1x128"])
    def test_a_bad_block_says_so(self, block):
        with pytest.raises((TypeError, ValueError), match="block must be"):
            Recipe.from_dict({"name": "r", "output": {"lhs": {"block": block}, "rhs": {}}})

    @pytest.mark.parametrize("read", [Recipe.from_json, Recipe.from_toml])
    def test_text_that_is_no_recipe(self, read):
        for text in ("", "{", "name: rowwise", "[1, 2"):
            with pytest.raises(ValueError, match=r"."):
                read(text)

    def test_prints_the_three_equations(self):
        head, *lines = str(recipes.get("rowwise_hp_grad_weight")).splitlines()
        assert head == "recipe 'rowwise_hp_grad_weight'"
        assert [line.split()[0] for line in lines] == list(GEMMS)
        assert "Q[e4m3 rowwise (fp32 pow2)](input) @ Q[e4m3 rowwise (fp32 pow2)](weight).T, precise" in lines[0]
        assert "Q[e4m3 rowwise (fp32 pow2)](grad_output) @ Q[e4m3 tensorwise (fp32 pow2)](weight.T).T" in lines[1]
        assert "Q" not in lines[2]
        assert lines[2].endswith("in the input's dtype")

    def test_prints_the_accumulation(self):
        fast = dataclasses.replace(recipes.get("rowwise"), grad_input=Gemm(ROW, ROW, "fast"))
        assert [line.rpartition(", ")[2] for line in str(fast).splitlines()[1:]] == ["precise", "fast", "precise"]


class TestNamed:
    def test_names(self):
        assert recipes.names() == NAMES
        recipes.names().clear()
        assert recipes.names() == NAMES

    @pytest.mark.parametrize("name", NAMES)
    def test_get(self, name):
        recipe = recipes.get(name)
        assert recipe.name == name
        assert recipes.get(recipe) is recipe
        assert recipes.get(name) == getattr(recipes, name)()

    def test_all_differ(self):
        assert len({dataclasses.replace(recipes.get(name), name="x") for name in NAMES}) == len(NAMES)

    def test_a_recipe_of_ones_own_is_returned_as_it_is(self):
        own = dataclasses.replace(recipes.get("rowwise"), name="own")
        assert recipes.get(own) is own

    @pytest.mark.parametrize(
        ("wrong", "nearest"),
        [
            ("row_wise", "rowwise"),
            ("Rowwise", "rowwise"),
            ("tensor", "tensorwise"),
            ("mxpf8", "mxfp8"),
            ("BF16", "bf16"),
            ("block", "blockwise"),
            ("rowwise_hp_gradweight", "rowwise_hp_grad_weight"),
        ],
    )
    def test_an_unknown_name_is_told_the_nearest(self, wrong, nearest):
        with pytest.raises(ValueError, match=f"no recipe is named '{wrong}'; did you mean '{nearest}'?") as error:
            recipes.get(wrong)
        assert all(name in str(error.value) for name in NAMES)

    @pytest.mark.parametrize("wrong", [None, 8, QuantSpec(), {"name": "rowwise"}])
    def test_neither_name_nor_recipe(self, wrong):
        with pytest.raises(TypeError, match=f"must be a name or a tritonfp8.Recipe; got {type(wrong).__name__}"):
            recipes.get(wrong)

    def test_what_each_is_made_of(self):
        e4m3, e5m2 = QuantSpec("e4m3"), QuantSpec("e5m2")
        expected = {
            "bf16": (Gemm(), Gemm(), Gemm()),
            "tensorwise": (Gemm(e4m3, e4m3), Gemm(e5m2, e4m3), Gemm(e5m2, e4m3)),
            "rowwise": (Gemm(ROW, ROW),) * 3,
            "rowwise_hp_grad_weight": (Gemm(ROW, ROW), Gemm(ROW, QuantSpec(scale_rounding="pow2")), Gemm()),
            "blockwise": (Gemm(VECTOR, SQUARE), Gemm(VECTOR, SQUARE), Gemm(VECTOR, VECTOR)),
            "mxfp8": (Gemm(MX, MX),) * 3,
            "mxfp4_weights": (Gemm(ROW, ROW),) * 3,
        }
        for name, gemms_of in expected.items():
            recipe = recipes.get(name)
            assert (recipe.output, recipe.grad_input, recipe.grad_weight) == gemms_of, name
            assert recipe.weights == (MXFP4 if name == "mxfp4_weights" else None)

    def test_every_gemm_is_precise(self):
        assert {getattr(recipes.get(name), gemm).accumulation for name in NAMES for gemm in GEMMS} == {"precise"}

    def test_shares(self):
        assert {name: recipes.get(name).quantized_share for name in NAMES} == {
            **dict.fromkeys(NAMES, 1.0),
            "bf16": 0.0,
            "rowwise_hp_grad_weight": pytest.approx(2 / 3),
        }

    def test_weight_and_its_transpose_see_the_same_bits_where_the_docstring_says_so(self):
        """blockwise: the block of the weight is its own transpose."""
        recipe = recipes.get("blockwise")
        assert recipe.output.rhs == recipe.grad_input.rhs
        assert transposed(recipe.output.rhs.block) == recipe.output.rhs.block


# Which rows each operand has, in the layout of its product: what "per ..." means for a rowwise scale.
ROWS = {
    "input": "token",
    "grad_output": "token",
    "weight": "output feature",
    "weight.T": "input feature",
    "grad_output.T": "output feature",
    "input.T": "input feature",
}
OPERAND = re.compile(
    r"(?:Q\[(?P<format>\w+)(?: (?P<blocks>[^\]]+))?\]\((?P<quantized>[\w.]+)\)|(?P<plain>\w+))(?P<t>\.T)?"
)


def flipped(name):
    return name.removesuffix(".T") if name.endswith(".T") else f"{name}.T"


def read_operand(text, is_rhs):
    """One side of a product as ``(operand, format, block)``, the operand in its layout, contraction last."""
    match = OPERAND.fullmatch(text)
    assert match, f"{text!r} is no operand"
    name, blocks = match["quantized"] or match["plain"], match["blocks"] or "tensorwise"
    if blocks.startswith("per "):
        assert blocks == f"per {ROWS[name]}", f"rows of {name} are not {blocks}"
        block = ROWWISE
    else:
        block = next(block for block, row in BLOCKS.items() if row.name == blocks)
    # `@ Q(x).T` is a product with rows of x; `@ Q(x)` one with rows of x.T, whose blocks are transposed.
    if bool(match["t"]) != is_rhs:
        name, block = flipped(name), transposed(block)
    return name, match["format"], block if match["format"] else None


def read_equations(doc):
    """The equations of a docstring: GEMM -> (lhs, rhs)."""
    found = {}
    for name, sides in re.findall(r"^\s*(\w+)\s*= (.+ @ .+)$", doc, re.MULTILINE):
        lhs, rhs = sides.split(" @ ")
        found[name] = (read_operand(lhs, False), read_operand(rhs, True))
    return found


class TestDocstrings:
    @pytest.mark.parametrize("name", NAMES)
    def test_the_equations_are_those_of_the_specs(self, name):
        recipe = recipes.get(name)
        equations = read_equations(getattr(recipes, name).__doc__)
        assert list(equations) == list(GEMMS)
        for gemm, sides in equations.items():
            for side, operand, spec in zip(
                sides, OPERANDS[gemm], (getattr(recipe, gemm).lhs, getattr(recipe, gemm).rhs), strict=True
            ):
                assert side == (operand, spec and spec.format, spec and spec.block), f"{gemm} of {name}"

    def test_the_reader_tells_a_wrong_docstring(self):
        """The reading above is only worth what it can refuse."""
        right = read_equations("output = Q[e4m3 1x128](input) @ Q[e4m3 128x128](weight).T")
        assert right == {"output": (("input", "e4m3", BLOCK_1X128), ("weight", "e4m3", BLOCK_128X128))}
        assert read_equations("output = Q[e4m3 1x128](input) @ Q[e4m3 128x128](weight)") != right
        assert read_equations("output = Q[e5m2 1x128](input) @ Q[e4m3 128x128](weight).T") != right
        assert read_equations("output = Q[e4m3 1x32](input) @ Q[e4m3 128x128](weight).T") != right
        assert read_equations("output = input @ weight.T") == {
            "output": (("input", None, None), ("weight", None, None))
        }
        assert read_equations("g = Q[e5m2](grad_output).T @ Q[e4m3](input)") == {
            "g": (("grad_output.T", "e5m2", TENSORWISE), ("input.T", "e4m3", TENSORWISE))
        }
        with pytest.raises(AssertionError, match="rows of weight are not per token"):
            read_equations("output = Q[e4m3 per token](input) @ Q[e4m3 per token](weight).T")

    @pytest.mark.parametrize("name", NAMES)
    def test_describe_gives_specs_and_docstring(self, name):
        text = recipes.describe(name)
        assert str(recipes.get(name)) in text
        assert list(read_equations(text.partition("\n\n")[2])) == list(GEMMS)

    def test_a_variant_is_described_by_its_own_specs_alone(self):
        """The docstring of the recipe it was made from is no longer true of it."""
        variant = dataclasses.replace(recipes.get("rowwise"), grad_weight=Gemm())
        assert recipes.describe(variant) == str(variant)
