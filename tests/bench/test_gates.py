"""The gates that a result passes before it is timed: each sees a wrong result, and none sees a format's noise."""

import math

import pytest
import torch

from bench.contest import gates
from bench.contest.cases import CASTS, LAYER_RECIPES
from bench.models import llama, training_step
from bench.shapes import Shape
from tritonfp8 import convert, recipes

MODEL_SHAPE = Shape("set", "two layers", (2, 64, 128, 2, 1, 1, 128))


def product(m=256, n=256, k=128):
    a, b = torch.randn(m, k), torch.randn(n, k)
    return a @ b.t()


@pytest.mark.parametrize("accumulation", ["precise", "fast"])
def test_the_gate_of_a_product_sees_one_tile_that_was_not_written(accumulation):
    expected = product()
    check = gates.close_gemm(expected, accumulation)
    check(expected.bfloat16())
    actual = expected.bfloat16()
    actual[128:, 128:] = 0
    with pytest.raises(AssertionError):
        check(actual)


def test_fast_accumulation_may_lose_more_than_precise():
    expected = product()
    noisy = (expected + expected.std() * 10 ** (-45 / 20) * torch.randn_like(expected)).bfloat16()
    gates.close_gemm(expected, "fast")(noisy)
    with pytest.raises(AssertionError):
        gates.close_gemm(expected, "precise")(noisy)


def test_the_gate_of_a_cast_sees_a_bit():
    x = torch.randn(32, 256, dtype=torch.bfloat16)
    case = CASTS[0]
    expected = case.expected(x)
    gates.same_bytes(expected)(case.run(x))
    actual = tuple(t.clone() for t in expected)
    actual[0].view(torch.uint8)[3, 5] ^= 1
    with pytest.raises(AssertionError, match="1 of 8192"):
        gates.same_bytes(expected)(actual)
    gates.nearly_same_bytes(expected[0])(actual)
    with pytest.raises(AssertionError, match="bytes are right"):
        gates.nearly_same_bytes(expected[0])((torch.zeros_like(expected[0]),))


@pytest.mark.parametrize("wrong_result", [None, 0, 1, 2])
def test_the_gate_of_a_layer_looks_at_all_three_products(wrong_result):
    recipe = recipes.get("rowwise_hp_grad_weight")
    x, weight, grad_output = torch.randn(128, 64), torch.randn(96, 64), torch.randn(128, 96)
    layer = torch.nn.Linear(64, 96, bias=False)
    layer.weight.data.copy_(weight)
    convert(layer, recipe)
    x.requires_grad_()
    out = layer(x)
    results = [out, *torch.autograd.grad(out, (x, layer.weight), grad_output)]
    check = gates.close_layer(recipe, x, weight, grad_output)
    if wrong_result is None:
        check(tuple(results))
        return
    results[wrong_result] = results[wrong_result] * 1.05
    with pytest.raises(AssertionError):
        check(tuple(results))


def test_the_gate_of_a_model_names_what_is_not_the_noise_of_the_format():
    expected = {"output": torch.randn(64, 64), "grad_input": torch.randn(64, 64)}
    check = gates.close_model(expected)
    check({name: e + 0.05 * torch.randn_like(e) for name, e in expected.items()})
    for wrong_result in (-expected["grad_input"], expected["grad_input"] * math.nan):
        with pytest.raises(AssertionError, match="grad_input: .* against bf16"):
            check(expected | {"grad_input": wrong_result})


@pytest.fixture(scope="module")
def llama_step():
    """A step of two layers in bf16, as the suite takes it: its function, its model, what it gives."""
    torch.manual_seed(0)
    x = torch.randn(1, 128, 64, dtype=torch.bfloat16).requires_grad_()
    grad_output = torch.randn(1, 128, 64, dtype=torch.bfloat16)

    def step(recipe=None):
        model = llama(MODEL_SHAPE, torch.device("cpu"))
        if recipe is not None:
            convert(model, recipe)
        return model, training_step(model, model.layers, x, grad_output)

    model, function = step()
    return step, model, function()


@pytest.mark.parametrize("recipe", LAYER_RECIPES)
def test_every_recipe_passes_the_gate_of_a_model_with_room(llama_step, monkeypatch, recipe):
    step, _, expected = llama_step
    monkeypatch.setattr(gates, "MODEL_SQNR", gates.MODEL_SQNR + 3)
    gates.close_model(expected)(step(recipe)[1]())


@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
def test_the_gate_of_a_model_sees_each_wrong_weight_with_room(llama_step, monkeypatch, projection):
    step, right, expected = llama_step
    monkeypatch.setattr(gates, "MODEL_SQNR", gates.MODEL_SQNR - 10)
    check = gates.close_model(expected)
    model, function = step()
    name = next(name for name, _ in model.layers[0].named_modules() if name.endswith(projection))
    weights, good = ([layer.get_submodule(name).weight for layer in m.layers] for m in (model, right))
    check(function())
    for i, wrong_weight in ((0, "zero"), (1, "negated"), (0, "the other layer's")):
        with torch.no_grad():
            for weight, value in zip(weights, good, strict=True):
                weight.copy_(value)
            weights[i].copy_({"zero": 0 * good[i], "negated": -good[i], "the other layer's": good[1 - i]}[wrong_weight])
        with pytest.raises(AssertionError, match="against bf16"):
            check(function())
