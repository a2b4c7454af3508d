"""Experts that cannot follow a recipe are skipped with a reason, and are an error where a pattern names them."""

import dataclasses

import pytest
import torch
from mixtures import experts_of, model_of
from torch import nn

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.recipes import Gemm, Recipe
from tritonfp8.specs import QuantSpec

SQUARE = QuantSpec("e4m3", (128, 128), "fp32", "pow2")
# Its blocks would have tokens of two experts.
SQUARES = Recipe("squares", output=Gemm(SQUARE, SQUARE))
FIRST = "model.layers.0.mlp.experts"


def parameter(experts, name, shape, dtype=torch.float32):
    experts.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))


# By the reason: the family, and what is done to its first experts.
CASES = {
    "their forward was replaced": ("mixtral", lambda e: setattr(e, "forward", lambda *args: args[0])),
    "their weights are torch.float64: cast the model": ("mixtral", lambda e: e.double()),
    "they have other parameters than their kind has": ("mixtral", lambda e: delattr(e, "down_proj")),
    "their weights are not parameters with three dims": ("mixtral", lambda e: parameter(e, "down_proj", (64, 96))),
    "their weights do not fit together": ("mixtral", lambda e: parameter(e, "down_proj", (4, 64, 80))),
    "their bias gate_up_proj_bias must have shape (4, 128); it has (128, 4)": (
        "gpt_oss", lambda e: parameter(e, "gate_up_proj_bias", (128, 4)),
    ),
    "their bias down_proj_bias must have shape (4, 64); it has none": (
        "gpt_oss", lambda e: e.register_parameter("down_proj_bias", None),
    ),
    "they have no act_fn": ("mixtral", lambda e: delattr(e, "act_fn")),
    "another program keeps experts in 8 bits": (
        "mixtral", lambda e: parameter(e, "down_proj", (4, 64, 96), torch.float8_e4m3fn),
    ),
    "out_features=8 below 16": ("mixtral", None),
    "recipe 'squares' does not serve experts": ("mixtral", None),
}  # fmt: skip


@pytest.mark.parametrize("reason", CASES)
def test_experts_that_cannot_be_converted(reason):
    family, change = CASES[reason]
    sizes = {"intermediate_size": 8} if "out_features" in reason else {}
    recipe = SQUARES if "squares" in reason else recipes.get("rowwise")
    model = model_of(family, **sizes)
    others = [name for name in experts_of(model) if change is not None and name != FIRST]
    if change is not None:
        change(experts_of(model)[FIRST])
    kinds = {name: type(each) for name, each in experts_of(model).items()}
    mapping = {FIRST: recipe, "*": "rowwise"}
    # A pattern of the filter counts as used where it matches small layers, as for linear layers.
    for arguments in ((mapping,), (recipe, [FIRST, "*o_proj"]))[: 1 if sizes else 2]:
        with pytest.raises(ValueError, match=FIRST) as caught:
            tritonfp8.convert(model, *arguments)
        assert f"{FIRST}: {reason}" in str(caught.value)
    assert {name: type(each) for name, each in experts_of(model).items()} == kinds
    report = tritonfp8.convert(model, recipe)
    assert report.skipped[FIRST].startswith(reason)
    assert f"{reason}" in str(report)
    assert [name for name in experts_of(model) if name in report.converted] == others
    assert any(name.endswith("o_proj") for name in report.converted)


def test_auto_leaves_experts_out_and_says_so():
    model = model_of("mixtral")
    report = tritonfp8.convert(model, "rowwise", "auto", tokens=2**20)
    assert "cannot tell whether they get slower" in report.skipped[FIRST]
    experts = nn.ModuleDict({"experts": experts_of(model)[FIRST]})
    with pytest.raises(ValueError, match=r"(?s)nothing was converted: .*cannot tell whether they get slower"):
        tritonfp8.convert(experts, "rowwise", "auto")


def test_what_a_model_keeps_in_float32():
    model = model_of("mixtral")
    model._keep_in_fp32_modules = ["experts"]
    report = tritonfp8.convert(model, "rowwise")
    assert report.skipped[FIRST].startswith("a layer that its model lists in _keep_in_fp32_modules")
    assert FIRST in tritonfp8.convert(model, "rowwise", ["*.experts"]).converted


def test_batch_invariant_experts():
    model = model_of("mixtral")
    report = tritonfp8.convert(model, "rowwise", batch_invariant=True)
    assert report.converted[FIRST].output.batch_invariant
    with pytest.raises(ValueError, match="cannot be batch-invariant|batch-invariant GEMM"):
        tritonfp8.convert(model_of("mixtral"), "tensorwise", batch_invariant=True)


def test_a_swap_to_a_recipe_that_does_not_serve_experts():
    model = model_of("mixtral")
    tritonfp8.convert(model, "rowwise")
    with pytest.raises(ValueError, match=f"recipe 'squares' does not serve the experts {FIRST}: "):
        tritonfp8.swap_recipe(model, SQUARES)
    assert {each.recipe.name for each in experts_of(model).values()} == {"rowwise"}


def test_inference_freezes_experts_whose_weights_cannot_be_stored():
    model = model_of("mixtral")
    tritonfp8.convert(model, "rowwise")
    experts_of(model)[FIRST].dispatch = object()
    report = tritonfp8.convert(model, "rowwise", mode="inference")
    assert report.unstored_experts == {FIRST: "they are sharded over ranks: convert the model before"}
    assert not experts_of(model)[FIRST].down_proj.requires_grad


@pytest.mark.parametrize("converted", [False, True])
def test_sensitivity_measures_experts_and_leaves_the_model_as_it_was(converted):
    model = model_of("mixtral")
    if converted:
        tritonfp8.convert(model, "rowwise")
    before = {name: (type(each), each.__dict__.get("recipe")) for name, each in experts_of(model).items()}
    ids = torch.randint(0, 96, (2, 12))
    found = tritonfp8.sensitivity(model, {"input_ids": ids, "labels": ids}, ["tensorwise", "rowwise"])
    assert set(experts_of(model)) <= set(found.errors)
    assert set(found.errors[FIRST]["rowwise"]) == {"output", "grad_input", "grad_weight"}
    assert {name: (type(each), each.__dict__.get("recipe")) for name, each in experts_of(model).items()} == before
    other = model_of("mixtral")
    assert dataclasses.asdict(tritonfp8.convert(other, found.mapping())).keys()
    assert set(found.errors) == {n for n, m in other.named_modules() if "recipe" in m.__dict__}
