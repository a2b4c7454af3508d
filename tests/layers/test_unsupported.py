"""Uses of torch that converted layers cannot serve are errors that name the layer and say what to do."""

import pytest
import torch
from cases import normal
from torch import nn

from tritonfp8 import Float8Linear, convert, revert
from tritonfp8.specs.testing import assert_bitwise_equal

SCRIPT = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
WAYS_OUT = r"torch\.export or torch\.jit\.trace.*tritonfp8\.revert\(model\)"


def conv1d():
    utils = pytest.importorskip("transformers.pytorch_utils")
    model = nn.Sequential(utils.Conv1D(48, 64))
    convert(model, "rowwise")
    return model


LAYERS = {
    "Float8Linear": lambda: nn.Sequential(nn.ReLU(), Float8Linear(64, 48, recipe="rowwise")),
    "Float8Conv1D": conv1d,
}


@SCRIPT
@pytest.mark.parametrize("name", LAYERS)
def test_script_is_an_error_that_names_the_layer(name):
    with pytest.raises(TypeError, match=rf"torch\.jit\.script.*got a {name} of tritonfp8.*{WAYS_OUT}"):
        torch.jit.script(LAYERS[name]())


@SCRIPT
def test_a_model_that_was_refused_still_runs_and_scripts_after_revert():
    """The error leaves the model as it was; a reverted model scripts to the result of the plain layers."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 20)), normal(33, 64)
    plain = model(x)
    convert(model, "rowwise")
    converted = model(x)
    with pytest.raises(TypeError, match="got a Float8Linear of tritonfp8"):
        torch.jit.script(model)
    assert_bitwise_equal(model(x), converted)
    revert(model)
    assert_bitwise_equal(torch.jit.script(model)(x), plain)


@SCRIPT
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("recipe", ["bf16", "tensorwise", "mxfp8"])
def test_trace_serves_other_inputs_to_the_bit(recipe):
    """What the error recommends: a trace quantizes each new input, and its shape may differ."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 20))
    convert(model, recipe)
    traced = torch.jit.trace(model, (normal(33, 64),))
    for rows in (33, 5):
        x = normal(rows, 64, seed=rows)
        assert_bitwise_equal(traced(x), model(x))
