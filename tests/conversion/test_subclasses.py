"""convert takes the linear layers of torchtitan and Falcon, by module and name: they compute what nn.Linear does."""

import copy
import re

import pytest
import torch
import transformers
from cases import normal
from mixtures import model_of
from torch import nn
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear

from tritonfp8 import convert, revert, swap_recipe, verify
from tritonfp8.layers.linear import Float8Linear, computes_linear
from tritonfp8.specs.testing import assert_bitwise_equal

TORCHTITAN = "torchtitan.models.common.linear"


class Protocol:
    """What torchtitan requires of every module."""

    def init_states(self):
        self.reset_parameters()


class Linear(nn.Linear, Protocol):
    pass


class Scaled(Linear):
    def forward(self, input):
        return 2 * super().forward(input)


Linear.__module__ = Scaled.__module__ = TORCHTITAN


def layer():
    torch.manual_seed(0)
    return nn.Sequential(Linear(32, 48))


def test_converted_layer_stays_what_it_was_and_computes_by_the_recipe():
    model, plain = layer(), nn.Sequential(nn.Linear(32, 48))
    plain.load_state_dict(model.state_dict())
    for each in (model, plain):
        assert list(convert(each, "rowwise").converted) == ["0"]
    assert isinstance(model[0], Float8Linear)
    assert isinstance(model[0], Linear)
    assert type(layer()[0]) is Linear
    x = normal(3, 32)
    assert_bitwise_equal(model(x), plain(x))
    assert "recipe='rowwise'" in repr(model)
    model[0].init_states()


def test_revert_gives_the_class_back():
    model = layer()
    convert(model, "rowwise")
    assert revert(model) == ["0"]
    assert type(model[0]) is Linear
    assert "recipe" not in model[0].__dict__


def test_falcon_is_converted_and_trains():
    """Its linear layer writes ``input @ weight.T + bias`` in its own forward."""
    sizes = {"vocab_size": 96, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "bias": True}
    torch.manual_seed(0)
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes))
    kinds = {name: type(module) for name, module in model.named_modules()}
    ids = torch.arange(24).view(2, 12)
    plain = model(ids, labels=ids).loss
    convert(model, "bf16")
    torch.testing.assert_close(model(ids, labels=ids).loss, plain)
    swap_recipe(model, "rowwise")
    model(ids, labels=ids).loss.backward()
    assert all(p.grad.any() for p in model.parameters())
    assert verify(model, ids, labels=ids).fp8_share > 0.8
    assert len(revert(model)) == 4
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    assert_bitwise_equal(model(ids, labels=ids).loss, plain)


def test_revert_refuses_a_forward_that_was_wrapped():
    model = layer()
    convert(model, "rowwise")
    forward = model[0].forward
    model[0].forward = lambda x: forward(x)
    with pytest.raises(ValueError, match="torchtitan wrapped the forward of 0"):
        revert(model)
    assert isinstance(model[0], Float8Linear)


def test_copies():
    model = layer()
    convert(model, "rowwise")
    x = normal(3, 32)
    copied = copy.deepcopy(model)
    assert type(copied[0]) is type(model[0])
    assert copied[0].recipe == model[0].recipe
    assert_bitwise_equal(copied(x), model(x))


def test_classes_that_compute_otherwise_are_skipped():
    model = nn.Sequential(Scaled(32, 32), nn.Linear(32, 32))
    assert list(convert(model, "rowwise").skipped) == ["0"]
    assert computes_linear(Linear)
    assert not computes_linear(type("Linear", (Scaled,), {"__module__": TORCHTITAN}))
    assert not computes_linear(type("Linear", (Linear,), {"__module__": "elsewhere"}))


def test_a_model_that_transformers_keeps_in_8_bits():
    """Its layers have codes and no values; the error says how to read the checkpoint here."""
    model = model_of("qwen3_moe", torch.bfloat16)
    model.model.layers[0].self_attn.q_proj = FP8Linear(64, 64, block_size=(128, 128))
    report = convert(model, "rowwise")
    reason = report.skipped["model.layers.0.self_attn.q_proj"]
    assert reason.startswith("another program keeps its weight in 8 bits (FP8Linear): make the model from its config")
    for layer in model.model.layers:
        layer.mlp.experts = FP8Experts(model.config, block_size=(128, 128))
    revert(model)
    report = convert(model, "rowwise")
    experts = [name for name in report.skipped if name.endswith("experts")]
    assert experts == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert re.match(r"another program keeps experts in 8 bits \(FP8Experts\): .*load", report.skipped[experts[0]])
    with pytest.raises(ValueError, match="decided the recipe of no layer.*0.mlp.experts, .*: another program keeps"):
        convert(model, {"*.experts": "mxfp8", "*": "rowwise"})
    with pytest.raises(ValueError, match=r"(?s)nothing was converted: .*another program keeps experts"):
        convert(model.model.layers[0].mlp.experts, "rowwise")
