"""The models that the suites build: layers of a Llama, on random hidden states."""

import math

import torch
from torch import nn

from bench.shapes import Shape

POSITIONS = 8192
# Standard deviation of the weights, times sqrt(hidden). Random layers as large as those of a training run begin (0.02,
# which is 1.28 at a hidden size of 4096) amplify whatever noise comes in, and noise could not be told from a wrong
# result; these add little to what goes around them, alike at every size.
WEIGHT_GAIN = 0.32


class Layers(nn.Module):
    """The decoder layers of a Llama, one after the other, causal.

    Nothing of the model around them is timed: neither its norm, which is not compiled, nor its choice of a mask, for
    which the host waits for the GPU in every step. (``distributed_models.attend_causally`` spares a whole model that.)
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layers, self.rotary_emb = model.layers, model.rotary_emb

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [batch, sequence, hidden]``."""
        positions = torch.arange(x.shape[1], device=x.device)[None]
        embeddings = self.rotary_emb(x, position_ids=positions)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=embeddings)
        return x


def llama(shape: Shape, device: torch.device) -> Layers:
    """Llama layers of a shape of the kind ``model``, bf16, the same weights at every call."""
    from transformers import LlamaConfig, LlamaModel

    layers, hidden, ffn, heads, kv_heads, _, _ = shape.size
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=POSITIONS,
        initializer_range=WEIGHT_GAIN / math.sqrt(hidden),
    )
    torch.manual_seed(0)
    with torch.device(device):
        return Layers(LlamaModel._from_config(config, dtype=torch.bfloat16))
