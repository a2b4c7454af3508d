"""An MLP with a gate."""

import torch.nn.functional as F
from torch import nn


class MLP(nn.Module):
    """SwiGLU of 64 features, with 96 inside."""

    def __init__(self, bias=False, activation=F.silu):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 96, bias), nn.Linear(64, 96, bias)
        self.down_proj = nn.Linear(96, 64, bias)
        self.activation = activation

    def forward(self, x):
        hidden = self.up_proj(x) * self.activation(self.gate_proj(x))
        return self.down_proj(hidden)
