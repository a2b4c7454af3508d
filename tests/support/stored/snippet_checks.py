"""Checks after the snippets of the documentation that store weights in 8 bits."""

import torch

from tritonfp8.layers.stored import StoredWeight


def check_stored(names):
    model = names["model"]
    assert [type(layer.weight) for layer in (model.gate, model.up, model.down)] == [StoredWeight] * 3
    assert not any(p.requires_grad for p in model.parameters())


def check_trained_in_8_bits(names):
    model, optimizer = names["model"], names["optimizer"]
    before = model.up.weight.dequantize()
    model(torch.randn(3, model.up.in_features)).square().mean().backward()
    optimizer.step()
    assert type(model.up.weight) is StoredWeight
    assert not torch.equal(model.up.weight.dequantize(), before)
