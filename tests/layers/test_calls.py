"""Host time: how many functions of the package an eager step calls."""

import pytest
import torch
from calls import calls_of
from cases import normal
from torch import nn

import tritonfp8

# Forward and backward.
LINEAR, EXPERTS = (22, 14), (60, 36)
RECIPES = ["rowwise", "tensorwise", "blockwise"]


def check(call, most):
    """``call()`` returns a tensor with a gradient, and has been made before."""
    call().sum().backward()
    forward, out = calls_of(call)
    backward, _ = calls_of(lambda: out.backward(torch.ones_like(out)))
    for found, limit in zip((forward, backward), most, strict=True):
        assert 0 < len(found) <= limit, "\n".join(found)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_of_a_layer_calls_few_functions(recipe):
    """The layer has a sibling, a bias, and an input that needs a gradient: the longest way of plain tensors."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    tritonfp8.convert(model, recipe)
    x = normal(8, 64).requires_grad_()
    check(lambda: model[0](x), LINEAR)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_of_experts_calls_few_functions(recipe):
    experts = tritonfp8.Float8Experts(4, 64, 48, recipe=recipe)
    x, weights = normal(16, 64).requires_grad_(), torch.full((16, 2), 0.5, requires_grad=True)
    index = torch.arange(32).view(16, 2) % 4
    check(lambda: experts(x, index, weights), EXPERTS)


def test_a_call_that_is_added_is_counted():
    assert calls_of(lambda: tritonfp8.recipes.get("rowwise"))[0] == ["recipes/named.py:get", "recipes/named.py:_found"]
