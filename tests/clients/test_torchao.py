"""torchao's quantize_ with a config of ours: the layers that it chooses are converted for inference."""

import pytest
import torch
from torch import nn
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_
from transformers.pytorch_utils import Conv1D

import tritonfp8
from tritonfp8 import Float8Linear, recipes
from tritonfp8.integrations.torchao import TritonFP8Config
from tritonfp8.layers.stored import StoredWeight
from tritonfp8.specs.testing import assert_bitwise_equal

QUANTIZED = [name for name in recipes.names() if recipes.get(name).output.rhs is not None]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 8), nn.LayerNorm(8)).bfloat16()


def x():
    return torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("name", QUANTIZED)
def test_layers_are_those_of_convert(name):
    ours, theirs = model(), model()
    tritonfp8.convert(ours, name, lambda layer, fqn: True, mode="inference")
    quantize_(theirs, TritonFP8Config(name))
    assert [type(layer) for layer in theirs] == [Float8Linear, nn.ReLU, Float8Linear, nn.LayerNorm]
    assert [type(theirs[i].weight) for i in (0, 2)] == [StoredWeight] * 2
    assert_bitwise_equal([theirs(x())], [ours(x())])
    assert "100 %" in str(tritonfp8.verify(theirs, x()))


def test_its_filter_chooses_the_layers_which_can_be_batch_invariant():
    found = model()
    quantize_(found, TritonFP8Config("rowwise", batch_invariant=True), lambda layer, fqn: fqn == "0")
    assert [type(found[i]) for i in (0, 2)] == [Float8Linear, nn.Linear]
    assert found[0].recipe == recipes.get("rowwise", batch_invariant=True)


def test_wrong_configs_and_weights_are_errors():
    with pytest.raises(ValueError, match="no recipe is named 'rowise'; did you mean 'rowwise'"):
        TritonFP8Config("rowise")
    with pytest.raises(ValueError, match="recipe 'tensorwise': a batch-invariant GEMM needs"):
        TritonFP8Config("tensorwise", batch_invariant=True)
    with pytest.raises(ValueError, match="its weight is torch.float16"):
        quantize_(model().half(), TritonFP8Config("rowwise"))


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("config", [Int8WeightOnlyConfig, Float8WeightOnlyConfig])
def test_other_configs_on_converted_layers_are_errors_that_name_revert(config, mode):
    found = model()
    tritonfp8.convert(found, "rowwise", mode=mode)
    weight = found[0].weight
    with pytest.raises(TypeError, match=r"of torchao.*by its filter, or call tritonfp8\.revert\(model\)"):
        quantize_(found, config())
    assert found[0].weight is weight
    tritonfp8.revert(found)
    quantize_(found, config())
    assert type(found[0].weight).__module__.startswith("torchao")


@pytest.mark.parametrize("kind", ["conv1d", "experts"])
def test_no_converted_layer_takes_a_tensor_of_torchao(kind):
    linear = nn.Linear(64, 32, bias=False).bfloat16()
    quantize_(linear, Int8WeightOnlyConfig())
    if kind == "conv1d":
        layer, name = nn.Sequential(Conv1D(32, 64)), "weight"
        tritonfp8.convert(layer, "rowwise")
        layer = layer[0]
    else:
        layer, name = tritonfp8.Float8Experts(2, 64, 32, recipe="rowwise"), "down_proj"
    with pytest.raises(TypeError, match=f"the {name} of a converted layer must be .* of torchao.*revert"):
        setattr(layer, name, linear.weight)
