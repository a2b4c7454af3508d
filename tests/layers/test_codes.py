"""Codes without their scales are no values: each way into the weight of a converted layer refuses them."""

import itertools

import accelerate
import pytest
import safetensors.torch
import torch
from mixtures import experts_of, model_of
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers.pytorch_utils import Conv1D

import tritonfp8
from tritonfp8 import QuantSpec
from tritonfp8.layers import stored
from tritonfp8.specs.testing import assert_bitwise_equal

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
KINDS = ["linear", "conv1d", "experts"]
each_kind = pytest.mark.parametrize("kind", KINDS)
each_storage = pytest.mark.parametrize("mode", ["training", "inference"])
LOAD = r"tritonfp8\.export\.load"


def layer_of(kind, mode):
    """A model, the name of a weight, the converted layer that has it, and its name there."""
    torch.manual_seed(0)
    if kind == "experts":
        model = model_of("qwen3_moe", torch.bfloat16)
        tritonfp8.convert(model, "rowwise", mode=mode)
        name, module = next(iter(experts_of(model).items()))
        return model, f"{name}.down_proj", module, "down_proj"
    layer = nn.Linear(64, 32) if kind == "linear" else Conv1D(32, 64)
    model = nn.Sequential(layer.bfloat16())
    tritonfp8.convert(model, "rowwise", mode=mode)
    return model, "0.weight", layer, "weight"


def codes_of(shape, dtype):
    return torch.full(shape, 64.0).to(dtype)


def codes_and_scale(name, shape):
    return {name: codes_of(shape, torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}


def values_of(model):
    return [x.clone() for x in model.state_dict().values()]


@each_storage
@each_kind
def test_load_state_dict(kind, mode):
    model, name, layer, key = layer_of(kind, mode)
    before, shape = values_of(model), getattr(layer, key).shape
    for dtype, assign in itertools.product(DTYPES, (False, True)):
        with pytest.raises(ValueError, match=f"{name} must have values.*{dtype}.*{LOAD}"):
            model.load_state_dict({name: codes_of(shape, dtype)}, strict=False, assign=assign)
    # Code that casts a state_dict to bfloat16 leaves the scale beside it.
    for suffix, strict in itertools.product(("_scale_inv", "_scale", "_scale_2"), (True, False)):
        state = {name: torch.full(shape, 64.0, dtype=torch.bfloat16), f"{name}{suffix}": torch.ones(1)}
        with pytest.raises(ValueError, match=f"{name}{suffix} is a scale.*{LOAD}"):
            model.load_state_dict(state, strict=strict)
    assert_bitwise_equal(values_of(model), before)


@pytest.mark.parametrize("key", ["scale", "input_scale", "activation_scale"])
def test_other_scales_beside_a_weight(key):
    model, _, layer, _ = layer_of("linear", "training")
    with pytest.raises(ValueError, match=rf"0\.{key} is a scale.*{LOAD}"):
        model.load_state_dict({"0.weight": torch.ones(layer.weight.shape), f"0.{key}": torch.ones(1)}, strict=False)


def test_other_names_load_as_before():
    model, _, layer, _ = layer_of("linear", "inference")
    layer.register_buffer("output_scale", torch.zeros(1))
    state = {"0.weight": torch.ones(32, 64), "0.output_scale": torch.ones(1), "0.upscaled": torch.ones(1)}
    found = model.load_state_dict(state, strict=False)
    assert found.unexpected_keys == ["0.upscaled"]
    assert layer.output_scale.item() == 1
    assert torch.equal(layer.weight.dequantize(), torch.ones(32, 64).bfloat16())
    # Rows of another layer: torch says that they are unexpected.
    assert model.load_state_dict({"1.weight_scale": torch.ones(1)}, strict=False).unexpected_keys == ["1.weight_scale"]


LOADERS = {
    "safetensors": lambda model, state, path: safetensors.torch.load_model(model, path, strict=False),
    "accelerate": lambda model, state, path: accelerate.load_checkpoint_in_model(model, str(path)),
    "a distributed state_dict": lambda model, state, path: set_model_state_dict(
        model, state, options=StateDictOptions(strict=False)
    ),
}


@each_storage
@pytest.mark.parametrize("loader", LOADERS)
def test_loaders_of_others(loader, mode, tmp_path):
    model, name, layer, _ = layer_of("linear", mode)
    state, path = codes_and_scale(name, layer.weight.shape), tmp_path / "model.safetensors"
    safetensors.torch.save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=LOAD):
        LOADERS[loader](model, state, path)


@each_dtype
@each_storage
@each_kind
def test_a_parameter_of_codes_is_not_assigned(kind, mode, dtype):
    # transformers and peft assign parameters by setattr.
    _, _, layer, key = layer_of(kind, mode)
    before = getattr(layer, key)
    with pytest.raises(ValueError, match=f"{key} must have values.*{dtype}.*{LOAD}"):
        setattr(layer, key, nn.Parameter(codes_of(before.shape, dtype), requires_grad=False))
    assert getattr(layer, key) is before


@each_dtype
@each_kind
def test_writes_to_a_stored_weight(kind, dtype):
    _, _, layer, key = layer_of(kind, "inference")
    weight = getattr(layer, key)
    codes, before = codes_of(weight.shape, dtype), weight.dequantize()

    def assign_data():
        weight.data = codes

    writes = (
        lambda: weight.copy_(codes),
        assign_data,
        lambda: weight[:2].copy_(codes[:2]),
        lambda: weight[0].copy_(codes[0]),
        lambda: torch._foreach_copy_([weight[0]], [codes[0]]),
        lambda: weight.__setitem__(0, codes[0]),
    )
    for write in writes:
        with torch.no_grad(), pytest.raises(ValueError, match=f"must have values.*{dtype}.*{LOAD}"):
            write()
    assert_bitwise_equal([weight.dequantize()], [before])


def test_writes_to_a_trained_weight():
    layer = nn.Linear(64, 32, bias=False)
    tritonfp8.convert(layer, "rowwise", weight_storage="quantized")
    before = layer.weight.dequantize()
    with torch.no_grad(), pytest.raises(ValueError, match=f"must have values.*{LOAD}"):
        torch._foreach_copy_([layer.weight], [codes_of((32, 64), torch.float8_e4m3fn)])
    assert_bitwise_equal([layer.weight.dequantize()], [before])
    # A mask of bytes multiplies.
    with torch.no_grad():
        layer.weight.mul_(torch.zeros(32, 64, dtype=torch.uint8))
    assert not layer.weight.dequantize().any()


@each_dtype
def test_codes_are_not_stored_as_values(dtype):
    with pytest.raises(ValueError, match=f"must have values.*{LOAD}"):
        stored.store(codes_of((32, 64), dtype), QuantSpec(block=(1, -1), scale_rounding="pow2"))


@each_dtype
@each_kind
def test_codes_that_were_put_past_the_layer_are_not_multiplied(kind, dtype):
    # accelerate puts Parameters into module._parameters.
    _, _, layer, key = layer_of(kind, "training")
    weight = getattr(layer, key)
    layer._parameters[key] = nn.Parameter(codes_of(weight.shape, dtype), requires_grad=False)
    rows = torch.ones(4, 64, dtype=torch.bfloat16)
    inputs = [rows] if kind != "experts" else [rows, torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)]
    with pytest.raises(ValueError, match=f"weight must have values.*{dtype}.*{LOAD}"):
        layer(*inputs)


def test_layers_that_another_program_keeps_in_8_bits_are_not_converted():
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))
    model.load_state_dict({"0.weight": codes_of((32, 64), torch.float8_e4m3fn)}, strict=False, assign=True)
    report = tritonfp8.convert(model, "rowwise")
    assert list(report.converted) == ["1"]
    assert "keeps its weight in 8 bits" in report.skipped["0"]
    assert "tritonfp8.export.load" in report.skipped["0"]
