"""A small model with two kinds of blocks, and advice on it, measured on the CPU."""

import pytest
import torch
from torch import nn

import tritonfp8
from tritonfp8.advice import result


class Block(nn.Module):
    def __init__(self, width, inner, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x, scale=1.0):
        return x + scale * self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Blocks of two kinds, the second kind from place 1 on; block i must stand at place i."""

    def __init__(self, inner=(32, 64, 64, 64, 32)):
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(Block(32, size, i) for i, size in enumerate(inner))
        self.lm_head = nn.Linear(32, 48)

    def forward(self, x):
        x = self.embed(x)
        for place, block in enumerate(self.blocks):
            assert block.layer_idx == place
            x = block(x, scale=0.5)
        return self.lm_head(x)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().bfloat16()


@pytest.fixture
def x():
    return torch.randn(64, 16, dtype=torch.bfloat16)


@pytest.fixture
def timing():
    """A timing in which everything takes a number of seconds."""

    def made(seconds, host=0.0, gpu=None, peak=None):
        return result.Timing(seconds, host, gpu, 0.0, peak)

    return made


@pytest.fixture
def advise(model, x):
    def run(*recipes, **options):
        return tritonfp8.advise(model, x, recipes=recipes or ["rowwise"], **{"compiler": "eager", **options})

    return run
