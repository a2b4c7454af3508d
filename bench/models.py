"""Models of the suites: decoder layers of a Llama, on random hidden states."""

import math

import torch
from torch import nn

from bench.shapes import Shape

POSITIONS = 8192
# Standard deviation of the weights, times sqrt(hidden). With the usual initial weights (0.02, or 1.28 here at a hidden
# size of 4096) random layers amplify noise so much that it cannot be told from a wrong result. Smaller weights add
# little to the residual stream, equally at every size.
WEIGHT_GAIN = 0.32


def with_head(recipe: str) -> dict[str, str]:
    """The recipe for every layer of a Llama: the head is converted only by a pattern that names it.

    Figures were measured with converted heads, as they are in the comparison's other contestants.
    """
    return {"*lm_head": recipe, "*": recipe}


class Layers(nn.Module):
    """The decoder layers of a Llama in sequence, with causal attention.

    The rest of the model is not timed: its final norm is not compiled, and to choose a mask the host waits for the GPU
    in each step. (``bench.distributed.models.attend_causally`` avoids that wait in a whole model.)
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
    """bf16 Llama layers for a shape of the kind ``model``; every call gives the same weights."""
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
