"""Host time: how many functions of the package an eager step calls."""

import pytest
import torch
from calls import calls_of
from cases import normal
from torch import nn

import tritonfp8

FORWARD, BACKWARD = 22, 14


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "blockwise"])
def test_a_warm_step_of_a_layer_calls_few_functions(recipe):
    """The layer has a sibling, a bias, and an input that needs a gradient: the longest way of plain tensors."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    tritonfp8.convert(model, recipe)
    x = normal(8, 64).requires_grad_()
    model[0](x).sum().backward()
    forward, out = calls_of(lambda: model[0](x))
    backward, _ = calls_of(lambda: out.backward(torch.ones_like(out)))
    assert 0 < len(forward) <= FORWARD, "\n".join(forward)
    assert 0 < len(backward) <= BACKWARD, "\n".join(backward)


def test_a_call_that_is_added_is_counted():
    assert calls_of(lambda: tritonfp8.recipes.get("rowwise"))[0] == ["recipes/named.py:get", "recipes/named.py:_found"]
