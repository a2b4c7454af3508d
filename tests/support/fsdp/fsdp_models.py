"""The models of the tests of FSDP2, of sizes that nothing divides."""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

VOCABULARY = 67


def recomputed(call, x, how):
    """``call(x)``, once more in backward: ``"yes"``, ``"reentrant"``, ``"selective"`` (without its GEMMs) or None."""
    if how == "selective":
        gemms = [torch.ops.tritonfp8.scaled_matmul.default, torch.ops.tritonfp8.matmul.default]
        contexts = functools.partial(create_selective_checkpoint_contexts, gemms)
        return checkpoint(call, x, use_reentrant=False, context_fn=contexts)
    return call(x) if how is None else checkpoint(call, x, use_reentrant=how == "reentrant")


class Block(nn.Module):
    """A Llama layer of sizes that nothing divides; or only its MLP."""

    def __init__(self, hidden, heads, intermediate, attention=True):
        super().__init__()
        self.norm2 = nn.RMSNorm(hidden)
        self.head_size = hidden // heads if attention else None
        if attention:
            self.norm1 = nn.RMSNorm(hidden)
            self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(intermediate, hidden, bias=False)
        self.recompute = None

    def forward(self, x):
        return recomputed(self.layer, x, self.recompute)

    def attended(self, x):
        h = self.norm1(x)
        q, k, v = (linear(h).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def layer(self, x):
        if self.head_size is not None:
            x = self.attended(x)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """``forward`` gives the loss of the next token."""

    def __init__(self, hidden=42, heads=3, intermediate=131, layers=2, tied=False, attention=True):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads, intermediate, attention) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.last = nn.Linear(hidden, VOCABULARY)
        if tied:
            self.last.weight = self.embed.weight
        self.recompute = None

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = recomputed(layer, x, self.recompute)
        return loss_of(self.last(self.norm(x)), tokens)


@torch.no_grad()
def initialize(model):
    """The same everywhere, and over so many binades that a wrong scale shows."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 2:
            values = 0.05 * values * torch.exp(1.5 * torch.randn(parameter.shape, generator=generator))
        parameter.copy_(1 + 0.1 * values if "norm" in name else values)
    return model


class Linears(nn.Module):
    """Linear layers ``[N, K]`` of their own, on slices of one input."""

    def __init__(self, shapes):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(k, n, bias=False) for n, k in shapes)

    def forward(self, x):
        return sum(layer(x[:, : layer.in_features]).sum(1) for layer in self.layers)


class Stage(nn.Module):
    """One of ``stages`` pipeline stages of a Llama, with one layer each."""

    def __init__(self, index, stages, hidden=42):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden) if index == 0 else None
        self.layer = Block(hidden, 3, 131)
        self.last = nn.Linear(hidden, VOCABULARY) if index == stages - 1 else None

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        x = self.layer(x)
        return x if self.last is None else self.last(x)


def loss_of(logits, tokens):
    """The loss of the next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
