"""accelerate beside a converted model: its own ``mixed_precision="fp8"`` replaces no layer, and bf16 trains it."""

import sys
from types import ModuleType

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import transformer_engine
from callback_cases import llama, trainer
from cases import each_recipe, normal
from torch import nn
from torchao.float8 import convert_to_float8_training

import tritonfp8
from tritonfp8 import Float8Linear
from tritonfp8.integrations.transformers import Float8Callback


@pytest.fixture(autouse=True)
def fresh_state():
    """accelerate keeps its settings for the life of a process."""
    states = (AcceleratorState, GradientState, PartialState)
    kept = [dict(state._shared_state) for state in states]
    for state in states:
        state._shared_state.clear()
    yield
    for state, before in zip(states, kept, strict=True):
        state._shared_state.clear()
        state._shared_state.update(before)


def model(filter=None, recipe="rowwise"):
    torch.manual_seed(0)
    found = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    tritonfp8.convert(found, recipe, filter=filter)
    return found


def test_fp8_of_accelerate_is_an_error_that_says_what_to_set():
    found = model()
    optimizer = torch.optim.AdamW(found.parameters())
    with pytest.raises(TypeError, match=r"1 of Sequential follows .*rowwise.*torchao.*set mixed_precision=.bf16"):
        Accelerator(mixed_precision="fp8", cpu=True).prepare(found, optimizer)
    assert all(isinstance(layer, Float8Linear) for layer in found)


@each_recipe
def test_bf16_of_accelerate_trains_every_weight_as_autocast_does(recipe):
    found, plain, x = model(recipe=recipe), model(recipe=recipe), normal(8, 32)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (found, plain)]
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    prepared, stepped = accelerator.prepare(found, optimizers[0])
    accelerator.backward(prepared(x).square().sum())
    stepped.step()
    with torch.autocast("cpu", torch.bfloat16):
        out = plain(x)
    out.float().square().sum().backward()
    optimizers[1].step()
    for p, q, before in zip(found.parameters(), plain.parameters(), model().parameters(), strict=True):
        assert torch.equal(p, q)
        assert not torch.equal(p, before)


def packages(model):
    return [type(layer).__module__.partition(".")[0] for layer in model]


def test_other_layers_are_left_to_the_other_library():
    """The filters divide the layers, and a layer that was reverted is not refused."""
    found = model(filter=["0", "3"])
    convert_to_float8_training(found, module_filter_fn=lambda module, name: name == "1")
    assert packages(found) == ["tritonfp8", "torchao", "torch", "tritonfp8"]
    tritonfp8.revert(found)
    convert_to_float8_training(found)
    assert packages(found) == ["torchao"] * 4
    # Modules of other packages may replace a layer.
    found = model()
    found[0] = nn.Identity()
    found[1] = None
    assert isinstance(found[0], nn.Identity)


def test_transformer_engine_is_refused(monkeypatch):
    """Its layers need a GPU; accelerate puts stand-ins of the same name in the model."""

    class Linear(nn.Linear):
        def __init__(self, k, n, bias, params_dtype):
            super().__init__(k, n, bias, dtype=params_dtype)

    Linear.__module__ = "transformer_engine.pytorch.module.linear"
    package, pytorch = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    package.pytorch, pytorch.Linear, pytorch.LayerNorm = pytorch, Linear, nn.LayerNorm
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", pytorch)
    monkeypatch.setattr(transformer_engine, "is_transformer_engine_available", lambda: True)
    Accelerator(cpu=True)
    with pytest.raises(TypeError, match=r"0 of Sequential follows.*TransformerEngine"), torch.no_grad():
        transformer_engine.convert_model(model())


def test_the_callback_refuses_fp8_when_the_trainer_is_made(monkeypatch, tmp_path):
    """``accelerate launch --mixed_precision fp8`` sets this variable."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    found = llama()
    with pytest.raises(ValueError, match=r"mixed_precision=.fp8.*torchao.*bf16=True"):
        trainer(found, tmp_path, Float8Callback("rowwise"))
    assert not any(isinstance(m, Float8Linear) for m in found.modules())


def test_a_model_converted_by_hand_is_refused_when_the_training_begins(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    found = llama()
    converted = tritonfp8.convert(found, "rowwise").converted
    with pytest.raises(TypeError, match="follows the recipe 'rowwise'"):
        trainer(found, tmp_path).train()
    assert sum(isinstance(m, Float8Linear) for m in found.modules()) == len(converted)


def test_bf16_of_the_trainer_beside_that_variable_trains(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    found, callback = llama(), Float8Callback("rowwise")
    before = [p.detach().clone() for p in found.parameters()]
    trainer(found, tmp_path, callback, bf16=True).train()
    assert all(not torch.equal(p, old) for p, old in zip(found.parameters(), before, strict=True))
    assert sum(isinstance(m, Float8Linear) for m in found.modules()) == len(callback.report.converted)
