"""Recipes in files, and variants of a recipe by one argument."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import recipes as any_recipe
from torch import nn

from tritonfp8 import convert, recipes, swap_recipe
from tritonfp8.recipes import GEMMS


@given(any_recipe())
def test_a_saved_recipe_is_read_back(tmp_path_factory, recipe):
    path = tmp_path_factory.mktemp("recipes") / "mine.toml"
    recipes.save(recipe, path)
    assert recipes.load(path) == recipes.load(str(path)) == recipes.get(str(path)) == recipe


def test_every_name_can_be_saved(tmp_path):
    for name in recipes.names():
        recipes.save(name, tmp_path / f"{name}.toml")
        assert recipes.get(str(tmp_path / f"{name}.toml")) == recipes.get(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("name = [", "cannot be parsed"),
        ("[output]", "needs a 'name'"),
        ("name = 3", "non-empty str"),
        ('name = "a"\n[output]\nlhs = {format = "e4m3"}', "both operands"),
        ('name = "a"\n[outputs]', "'outputs' as well"),
        (b"\xff", "decode"),
    ],
)
def test_a_file_that_holds_no_recipe_is_named(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=rf"(?s)mine\.toml is not the file of a recipe: .*{message}"):
        recipes.get(str(path))


def test_an_unknown_name_says_that_files_have_an_ending():
    with pytest.raises(ValueError, match=r"did you mean 'rowwise'.*or the path of a \.toml file"):
        recipes.get("rowvise")


@pytest.mark.parametrize("name", recipes.names())
def test_accumulation_of_all_quantized_gemms(name):
    plain, fast = recipes.get(name), recipes.get(name, accumulation="fast")
    assert recipes.get(name, accumulation="precise") is plain
    for gemm in GEMMS:
        quantized = getattr(plain, gemm).quantized
        assert getattr(fast, gemm).accumulation == ("fast" if quantized else "precise")
        assert getattr(fast, gemm).lhs == getattr(plain, gemm).lhs
    assert fast.name == (f"{name}_fast" if plain.output.quantized else name)
    assert recipes.get(fast, accumulation="fast") is fast


def test_the_file_in_the_docs():
    page = (Path(__file__).resolve().parents[1] / "docs" / "convert.md").read_text()
    text, _ = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    recipe = recipes.Recipe.from_toml(text)
    assert recipe.output == recipes.get("rowwise").output
    assert (recipe.grad_input, recipe.grad_weight) == (recipes.get("tensorwise").grad_input, recipes.Gemm())


def test_the_file_of_layers_in_the_docs(tmp_path):
    page = (Path(__file__).resolve().parents[1] / "docs" / "convert.md").read_text()
    _, text = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "layers.toml").write_text(text)
    found = recipes.load(tmp_path / "layers.toml")
    assert list(found) == ["*.mlp.*", "*.0.*", "*"]
    fast = recipes.get("rowwise", accumulation="fast")
    assert found["*.0.*"] == recipes.Recipe("rowwise_fast", output=fast.output)


@given(st.lists(st.tuples(st.text(min_size=1), any_recipe()), min_size=1, unique_by=lambda row: row[0]))
def test_a_saved_mapping_is_read_back_in_its_order(tmp_path_factory, rows):
    # Of one name only the first: a file tells recipes apart by their names.
    named = {"rowwise": recipes.get("rowwise")}
    mapping = {pattern: named.setdefault(recipe.name, recipe) for pattern, recipe in rows}
    mapping = {**mapping, "*": "rowwise"}
    path = tmp_path_factory.mktemp("recipes") / "layers.toml"
    recipes.save(mapping, path)
    found = recipes.load(path)
    assert list(found.items()) == [(pattern, recipes.get(recipe)) for pattern, recipe in mapping.items()]


def test_a_file_of_layers_converts_and_swaps_as_its_mapping(tmp_path):
    def model():
        return nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))

    path, fast = str(tmp_path / "layers.toml"), recipes.get("rowwise", accumulation="fast")
    mapping = {"1.0": fast, "1.*": "mxfp8", "*": "rowwise"}
    recipes.save(mapping, path)
    first, second = model(), model()
    assert convert(first, path).converted == convert(second, mapping).converted
    assert {name: r.name for name, r in convert(model(), path).converted.items()} == {
        "0": "rowwise", "1.0": "rowwise_fast", "1.1": "mxfp8",
    }  # fmt: skip
    assert swap_recipe(first, path).converted == swap_recipe(second, mapping).converted
    with pytest.raises(ValueError, match=r"layers\.toml holds the recipes of layers.*one recipe is needed here"):
        recipes.get(path)


def test_mappings_that_a_file_cannot_hold_are_errors(tmp_path):
    path, output = tmp_path / "layers.toml", recipes.get("rowwise").output
    for first, second in (("rowwise", recipes.Recipe("rowwise")), (recipes.Recipe("a", output), recipes.Recipe("a"))):
        with pytest.raises(ValueError, match="two recipes are named '(rowwise|a)'"):
            recipes.save({"0": first, "*": second}, path)
    with pytest.raises(ValueError, match="name at least one pattern"):
        recipes.save({}, path)
    with pytest.raises(TypeError, match="a pattern of layer names must be a str; got int"):
        recipes.save({0: "rowwise"}, path)
    assert not path.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers = 3", "layers must be a table; got int"),
        ("[layers]", "name at least one pattern"),
        ('[layers]\n"*" = 3', r"the recipe of '\*' must be a str; got int"),
        ('[layers]\n"*" = "rowvise"', "no recipe is named 'rowvise'; did you mean 'rowwise'"),
        ('name = "a"\n[layers]\n"*" = "rowwise"', "'name' as well"),
        ('[layers]\n"*" = "a"\n[recipes]\na = 3', "recipes.a must be a table"),
        ('[layers]\n"*" = "a"\n[recipes.a]\noutputs = 3', "'outputs' as well"),
        ('[layers]\n"*" = "mxfp8"\n[recipes.mxfp8]', "the name of a built-in recipe"),
        ('[layers]\n"*" = "mxfp8"\n[recipes.a]', "no pattern of the table 'layers' has the recipe 'a'"),
    ],
)
def test_a_file_of_layers_with_mistakes_is_named(tmp_path, text, message):
    (tmp_path / "layers.toml").write_text(text)
    with pytest.raises(ValueError, match=rf"layers\.toml is not the file of a recipe or a mapping: .*{message}"):
        convert(nn.Linear(32, 32), str(tmp_path / "layers.toml"))


@given(st.one_of(st.none(), st.text(), st.integers()).filter(lambda value: value not in ("fast", "precise", None)))
def test_an_unknown_accumulation(value):
    with pytest.raises(ValueError, match="accumulation must be one of"):
        recipes.get("rowwise", accumulation=value)


def test_the_summary_has_a_line_for_each_recipe():
    lines = recipes.summary().splitlines()
    assert [line.split()[0] for line in lines] == recipes.names()
    assert all(line.endswith(".") or ":" in line for line in lines)
