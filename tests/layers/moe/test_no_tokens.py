"""Experts of a batch without tokens, as a rank may get one."""

import pytest
import torch
from cases import QUANTIZED

from tritonfp8 import Float8Experts
from tritonfp8.layers.moe import experts as module


@pytest.mark.parametrize("routed", [True, False])
@pytest.mark.parametrize("recipe", [*QUANTIZED, "bf16"])
def test_a_batch_without_tokens(recipe, routed, monkeypatch):
    """Nothing comes out, and every gradient is there, so that no other rank waits for it."""
    monkeypatch.setattr(module, "can_route", lambda *args: routed)
    experts = Float8Experts(5, 32, 48, recipe=recipe)
    hidden, factors = (torch.zeros(0, size, requires_grad=True) for size in (32, 2))
    out = experts(hidden, torch.zeros(0, 2, dtype=torch.int64), factors)
    assert out.shape == (0, 32)
    out.sum().backward()
    assert (hidden.grad.shape, factors.grad.shape) == (hidden.shape, factors.shape)
    assert all(p.grad.shape == p.shape and not p.grad.any() for p in experts.parameters())
