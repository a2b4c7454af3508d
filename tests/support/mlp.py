"""An MLP that ``fuse=True`` recognizes."""

import torch.nn.functional as F
from torch import nn


class MLP(nn.Module):
    """SwiGLU with unusual names; other options make it a different MLP."""

    def __init__(self, bias=False, activation=F.silu):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 96, bias), nn.Linear(64, 96, bias)
        self.down_proj = nn.Linear(96, 64, bias)
        self.activation = activation

    def forward(self, x):
        """A docstring.

        Of several lines.
        """
        hidden = self.up_proj(x) * self.activation(self.gate_proj(x))
        return self.down_proj(hidden)
