"""Causes by which a generator differs from a trainer, planted into a rollout: the module, what it reads, and codes."""

import pytest
import torch
from rollout_models import IDS, MASK

import tritonfp8
from tritonfp8.rollout import sharing


def instead(rollout, name, forward):
    """Let a module of the generator compute ``forward(module's own forward, *args)``."""
    module = rollout.model.get_submodule(name)
    own = module.forward
    module.forward = lambda *args, **options: forward(own, *args, **options)


def split_by_rows(rollout):
    """A GEMM of few rows splits K, and adds two rounded parts."""
    name = "model.layers.1.mlp.down_proj"

    def forward(own, x):
        if x.shape[1] > 1:
            return own(x)
        half = torch.arange(x.shape[-1]) < x.shape[-1] // 2
        return own(x * half) + own(x * ~half)

    instead(rollout, name, forward)
    return name, None, ()


def routing_order(rollout):
    """The results of experts are added in the order in which routing gives them, each sum rounded."""
    name = "model.layers.1.mlp.experts"

    def forward(own, x, indices, weights):
        if len(x) > len(IDS):
            return own(x, indices, weights)
        return sum(own(x, indices[:, i, None], weights[:, i, None]) for i in range(indices.shape[1]))

    instead(rollout, name, forward)
    return name, None, ()


def padded_row(rollout, mask=MASK):
    """A sum over the tokens of a prompt takes tokens that the mask hides."""
    name = "model.layers.0.post_attention_layernorm"

    def forward(own, x):
        # Only prompts have padding.
        hidden = (mask == 0)[..., None].to(x) if x.shape[1] == mask.shape[1] else x.new_zeros(1, 1, 1)
        return own(x) + 0.1 * (hidden * x).sum(1, keepdim=True)

    instead(rollout, name, forward)
    return name, None, ()


def quantized_twice(rollout, first="tensorwise"):
    """Codes of values that were rounded to other blocks before."""
    real, spec = sharing.stored_as_layer, tritonfp8.recipes.get(first).output.rhs

    def twice(layer, name, values, to):
        flat = values.reshape(-1, values.shape[-1])
        rounded = tritonfp8.dequantize(tritonfp8.quantize(flat, spec), values.dtype)
        return real(layer, name, rounded.view_as(values), to)

    with pytest.MonkeyPatch.context() as patch:
        # As what FSDP2 gathers, which is read before it is written.
        patch.setattr(sharing.OwnWeight, "is_cast_in_place", False)
        patch.setattr(sharing, "stored_as_layer", twice)
        rollout.refresh()
    return "model.layers.0.self_attn.v_proj", None, tuple(each.name for each in rollout.own)


CAUSES = {
    "split": (split_by_rows, "qwen3"),
    "routing order": (routing_order, "moe"),
    "padded row": (padded_row, "qwen3"),
    "quantized twice": (quantized_twice, "qwen3"),
    "experts quantized twice": (quantized_twice, "moe"),
}
