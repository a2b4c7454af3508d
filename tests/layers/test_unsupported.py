"""Uses of torch that converted layers cannot serve are errors that name the layer and say what to do."""

import pytest
import torch
from cases import normal
from torch import nn
from transformers.pytorch_utils import Conv1D

from tritonfp8 import convert, revert
from tritonfp8.specs.testing import assert_bitwise_equal

SCRIPT = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
WAYS_OUT = r"torch\.export or torch\.jit\.trace.*tritonfp8\.revert\(model\)"


# The plain model of each converted layer.
LAYERS = {
    "Float8Linear": lambda: nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 20)),
    "Float8Conv1D": lambda: nn.Sequential(Conv1D(48, 64)),
}


@SCRIPT
@pytest.mark.parametrize("name", LAYERS)
def test_script_is_an_error_that_names_the_layer(name):
    """The error leaves the model as it was; a reverted model scripts to the result of the plain layers."""
    torch.manual_seed(0)
    model, x = LAYERS[name](), normal(33, 64)
    plain = model(x)
    convert(model, "rowwise")
    converted = model(x)
    with pytest.raises(TypeError, match=rf"torch\.jit\.script.*got a {name} of tritonfp8.*{WAYS_OUT}"):
        torch.jit.script(model)
    assert_bitwise_equal(model(x), converted)
    revert(model)
    assert_bitwise_equal(torch.jit.script(model)(x), plain)


@SCRIPT
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "mxfp8"])
def test_trace_serves_other_inputs_to_the_bit(recipe):
    """What the error recommends: a trace quantizes each new input, and its shape may differ."""
    model = LAYERS["Float8Linear"]()
    convert(model, recipe)
    traced = torch.jit.trace(model, (normal(33, 64),))
    for rows in (33, 5):
        x = normal(rows, 64, seed=rows)
        assert_bitwise_equal(traced(x), model(x))
