"""The layers that are decoded: every weight of them is stored."""

import pytest
import torch

import tritonfp8
from bench.inference import decode
from tritonfp8.layers.stored import StoredWeight


@pytest.fixture
def layer(monkeypatch):
    for name, size in {"HIDDEN": 256, "HEADS": 128, "FFN": 384}.items():
        monkeypatch.setattr(decode, name, size)
    torch.manual_seed(0)
    return decode.Layer().bfloat16()


@pytest.fixture
def mixture(monkeypatch):
    for name, size in {"hidden": 128, "inside": 64, "experts": 4, "active": 2}.items():
        monkeypatch.setattr(decode.Mixture, name, size)
    torch.manual_seed(0)
    return decode.Mixture().bfloat16()


def test_experts_are_stored_and_the_router_is_not(mixture):
    x = torch.randn(5, 128, dtype=torch.bfloat16)
    plain = mixture(x)
    assert plain.shape == x.shape
    tritonfp8.convert(mixture, "rowwise", mode="inference")
    stored = {name for name, weight in mixture.named_parameters() if isinstance(weight, StoredWeight)}
    assert stored == {"block.experts.gate_up_proj", "block.experts.down_proj"}
    assert torch.nn.functional.cosine_similarity(mixture(x).float(), plain.float()).min() > 0.99


def test_every_weight_is_stored_and_read(layer):
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    plain = layer(x)
    tritonfp8.convert(layer, "rowwise", mode="inference")
    weights = dict(layer.named_parameters())
    assert len(weights) == 7
    assert all(isinstance(weight, StoredWeight) for weight in weights.values())
    stored = layer(x)
    for weight in weights.values():
        weight._scale.mul_(2)
    assert not torch.equal(layer(x), stored)
    assert torch.nn.functional.cosine_similarity(stored.float(), plain.float()).min() > 0.99
