"""What a converted model prints: a line for each layer, with its recipe, its shape and how its weights are stored."""

import pytest
import torch
import transformers
from mixtures import experts_of, model_of
from torch import nn

import tritonfp8
from tritonfp8 import Float8Experts, Float8Linear, Recipe, RecipeSchedule, recipes
from tritonfp8.layers.stored import StoredWeight
from tritonfp8.specs import QuantSpec

WIDTH = 120


def one_line(value):
    text = repr(value)
    assert "\n" not in text
    assert len(text) <= WIDTH
    return text


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe(name):
    recipe = recipes.get(name)
    assert one_line(recipe).startswith(f"Recipe({name!r}, output=")
    one_line(Recipe("a name of many words " * 9, recipe.output, recipe.grad_input, recipe.grad_weight))


def test_the_gemms_of_a_recipe():
    assert repr(recipes.get("rowwise_hp_grad_weight")) == (
        "Recipe('rowwise_hp_grad_weight', output=e4m3 x e4m3, grad_input=e4m3 x e4m3, grad_weight=high precision)"
    )
    one_line(Recipe("a name of many words " * 9))


def test_a_schedule():
    schedule = RecipeSchedule([(0, "bf16"), (1000, "rowwise"), ("90%", "bf16")], total_steps=10_000)
    schedule.load_state_dict({"next_step": 40})
    assert one_line(schedule) == "RecipeSchedule(0: 'bf16', 1000: 'rowwise', 9000: 'bf16', next_step=40)"
    names = ("bf16", "rowwise_hp_grad_weight")
    long = RecipeSchedule([(1000 * i, names[i % 2]) for i in range(80)])
    assert one_line(long) == (
        "RecipeSchedule(0: 'bf16', 1000: 'rowwise_hp_grad_weight', 77 more, 79000: 'rowwise_hp_grad_weight', "
        "next_step=0)"
    )


def layer(stored=False):
    with torch.device("cpu"):
        found = nn.Sequential(nn.Linear(256, 512))
    tritonfp8.convert(found, "rowwise_hp_grad_weight", mode="inference" if stored else "training")
    return found[0]


def test_a_linear_layer():
    name = "rowwise_hp_grad_weight"
    assert one_line(layer()) == f"Float8Linear(in_features=256, out_features=512, bias=True, recipe={name!r})"
    assert one_line(layer(stored=True)) == (
        f"Float8Linear(in_features=256, out_features=512, bias=True, recipe={name!r}, stored=e4m3)"
    )
    long = Recipe("a name of many words " * 9)
    one_line(Float8Linear(65536, 262144, recipe=long, device="meta"))


def test_a_conv1d():
    model = nn.Sequential(transformers.pytorch_utils.Conv1D(48, 70))
    tritonfp8.convert(model, "rowwise", mode="inference")
    assert one_line(model[0]) == "Float8Conv1D(in_features=70, out_features=48, recipe='rowwise', stored=e4m3)"


def test_a_stored_weight():
    weight = layer(stored=True).weight
    assert isinstance(weight, StoredWeight)
    assert one_line(weight) == f"StoredWeight((512, 256), torch.float32, {QuantSpec('e4m3', (1, -1), 'fp32', 'pow2')})"


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts(family):
    model = model_of(family)
    lines = len(str(model).splitlines())
    tritonfp8.convert(model, "rowwise", mode="inference")
    experts = next(iter(experts_of(model).values()))
    sizes = {"qwen3_moe": "8 experts, 64 -> 48 -> 64", "gpt_oss": "4 experts, 64 -> 64 -> 64"}[family]
    assert one_line(experts) == f"{type(experts).__name__}({sizes}, recipe='rowwise', stored=e4m3)"
    one_line(next(iter(experts.parameters())))
    # A model prints as before, or shorter: experts had a line more for their activation.
    printed = str(model).splitlines()
    assert len(printed) <= lines
    assert max(map(len, printed)) <= WIDTH


def test_our_own_experts():
    found = Float8Experts(512, 7168, 2048, recipe="rowwise_hp_grad_weight", device="meta")
    assert one_line(found) == ("Float8Experts(512 experts, 7168 -> 2048 -> 7168, recipe='rowwise_hp_grad_weight')")
