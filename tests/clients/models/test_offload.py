"""Models that accelerate offloads or dispatches, with weights stored in 8 bits: the same logits, and still stored."""

import accelerate
import pytest
import torch
from callback_cases import llama
from torch import nn

import tritonfp8
from tritonfp8.layers.stored import CodesTensor, StoredWeight
from tritonfp8.specs.testing import assert_bitwise_equal

VOCABULARY = 96


def stored(recipe="rowwise", dtype=torch.float32):
    torch.manual_seed(0)
    model = llama(VOCABULARY).to(dtype).eval()
    tritonfp8.convert(model, recipe, mode="inference")
    return model


@torch.no_grad()
def logits(model):
    tokens = torch.arange(24).view(2, 12) % VOCABULARY
    return model(tokens).logits


def dispatched(model, folder, device_map):
    options = {"main_device": "cpu", "offload_dir": folder, "force_hooks": True}
    return accelerate.dispatch_model(model, device_map=device_map, **options)


def half_on_disk(model):
    names = [name for name, _ in model.model.named_children() if name != "layers"]
    layers = {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(len(model.model.layers))}
    return {"lm_head": "cpu", **{f"model.{name}": "cpu" for name in names}, **layers}


WAYS = {
    "cpu_offload": lambda model, folder: accelerate.cpu_offload(model, "cpu"),
    "disk_offload": lambda model, folder: accelerate.disk_offload(model, folder, "cpu"),
    "dispatch_model": lambda model, folder: dispatched(model, folder, {"": "cpu"}),
    "dispatch_model, a part on disk": lambda model, folder: dispatched(model, folder, half_on_disk(model)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_logits_are_those_of_the_stored_model(way, dtype, tmp_path):
    expected = logits(stored(dtype=dtype))
    model = stored(dtype=dtype)
    converted = [m for m in model.modules() if isinstance(getattr(m, "weight", None), StoredWeight)]
    assert len(converted) == 14
    model = WAYS[way](model, tmp_path)
    for _ in range(2):
        assert torch.equal(logits(model), expected)
    # The hooks put Parameters of the same type into the layers, on the meta device or not.
    assert all(type(layer.weight) is StoredWeight for layer in converted)
    accelerate.hooks.remove_hook_from_submodules(model)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_other_recipes(recipe, tmp_path):
    expected = logits(stored(recipe))
    assert torch.equal(logits(accelerate.cpu_offload(stored(recipe), "cpu")), expected)


def test_a_tensor_is_set_by_name():
    model = stored()
    name = "model.layers.0.mlp.up_proj.weight"
    before, values = model.get_parameter(name), torch.randn(model.get_parameter(name).shape)
    accelerate.utils.set_module_tensor_to_device(model, name, "meta")
    assert (type(model.get_parameter(name)), model.get_parameter(name).device.type) == (StoredWeight, "meta")
    accelerate.utils.set_module_tensor_to_device(model, name, "cpu", value=values)
    now = model.get_parameter(name)
    assert (type(now), now.spec, now.requires_grad) == (StoredWeight, before.spec, False)
    assert_bitwise_equal([now._qdata], [before.of_values(values)._qdata])


def test_empty_weights_of_stored_layers():
    layer = nn.Linear(64, 32)
    tritonfp8.convert(layer, "rowwise", mode="inference")
    with accelerate.init_empty_weights():
        holder = nn.Module()
        holder.register_parameter("weight", layer.weight)
    assert isinstance(holder.weight, CodesTensor)
    assert holder.weight.is_meta
