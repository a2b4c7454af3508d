"""FlopCounterMode counts a converted layer as the plain linear layer that it was."""

import pytest
import torch
from cases import normal
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tritonfp8 import Float8Linear, convert, recipes

each_recipe = pytest.mark.parametrize("name", recipes.names())
PLAIN = 2 * 15 * 64 * 96


def flops(layer, x, backward=True):
    with FlopCounterMode(display=False) as counter:
        out = layer(x)
        if backward:
            out.sum().backward()
    return counter.get_total_flops()


@each_recipe
@pytest.mark.parametrize("needs_grad", [True, False])
def test_of_forward_and_backward(name, needs_grad):
    model, plain = nn.Sequential(nn.Linear(64, 96)), nn.Sequential(nn.Linear(64, 96))
    convert(model, name)
    x = normal(3, 5, 64).requires_grad_(needs_grad)
    assert flops(model, x) == flops(plain, x) == (2 + needs_grad) * PLAIN
    with torch.no_grad():
        assert flops(model, x, backward=False) == PLAIN


def test_of_a_compiled_layer():
    layer = Float8Linear(64, 96, recipe="rowwise")
    layer.compile(backend="aot_eager")
    assert flops(layer, normal(15, 64).requires_grad_()) == 3 * PLAIN


def test_of_an_exported_layer():
    program = torch.export.export(Float8Linear(64, 96, recipe="blockwise"), (normal(15, 64),))
    assert flops(program.module(), normal(15, 64).requires_grad_()) == 3 * PLAIN
    assert flops(program.module(), normal(15, 64)) == 2 * PLAIN
