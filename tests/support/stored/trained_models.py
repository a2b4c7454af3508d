"""A small model whose weights are stored in 8 bits and trained, on one rank."""

import torch
from torch import nn

import tritonfp8
from tritonfp8.layers.stored import direct, stored_part


def plain_model(device="cpu"):
    torch.manual_seed(0)
    sizes = (200, 136), (136, 200)
    first, second = (nn.Linear(*size) for size in sizes)
    return nn.Sequential(first, nn.GELU(), second).to(device)


def stored_model(name, device="cpu"):
    model = plain_model(device)
    tritonfp8.convert(model, name, weight_storage="quantized")
    return model


def data(device="cpu"):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 200, generator=generator).to(device)
    return x, torch.tanh(x.roll(1, 1))


def train(model, optimizer, steps, device="cpu", autocast=False):
    x, y = data(device)
    losses = []
    for _ in range(steps):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def codes(model):
    return [part._qdata.view(torch.uint8).clone() for p in model.parameters() if (part := stored_part(p)) is not None]


def counts_of_writes(monkeypatch):
    """Counts of direct steps and writes, of zero; for a fixture."""
    found = direct._Counts()
    monkeypatch.setattr(direct, "_counts", found)
    return found


def values(model):
    return {name: x.clone() for name, x in model.state_dict().items()}
