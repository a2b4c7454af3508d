"""swap_recipe between any two recipes."""

import pytest
import torch
from cases import normal
from torch import nn

from tritonfp8 import convert, recipes, swap_recipe
from tritonfp8.specs.testing import assert_bitwise_equal


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 16))


def step(model):
    out = model(normal(7, 32))
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("name", recipes.names())
def test_a_swapped_model_computes_as_one_converted_to_the_recipe(name):
    swapped, expected, other = model(), model(), "bf16" if name == "tensorwise" else "tensorwise"
    convert(swapped, other)
    before = step(swapped)
    swapped.zero_grad()
    swap_recipe(swapped, name)
    convert(expected, name)
    found = step(swapped)
    assert not all(map(torch.equal, found, before))
    assert_bitwise_equal(found, step(expected))
