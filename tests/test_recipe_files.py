"""Recipes in files, and variants of a recipe by one argument."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import recipes as any_recipe

from tritonfp8 import recipes
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
    (text,) = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    recipe = recipes.Recipe.from_toml(text)
    assert recipe.output == recipes.get("rowwise").output
    assert (recipe.grad_input, recipe.grad_weight) == (recipes.get("tensorwise").grad_input, recipes.Gemm())


@given(st.one_of(st.none(), st.text(), st.integers()).filter(lambda value: value not in ("fast", "precise", None)))
def test_an_unknown_accumulation(value):
    with pytest.raises(ValueError, match="accumulation must be one of"):
        recipes.get("rowwise", accumulation=value)


def test_the_summary_has_a_line_for_each_recipe():
    lines = recipes.summary().splitlines()
    assert [line.split()[0] for line in lines] == recipes.names()
    assert all(line.endswith(".") or ":" in line for line in lines)
