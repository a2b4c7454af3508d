"""make_exact: let a model compute every token by an order that does not depend on the batch."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from torch import nn

from tritonfp8.conversion import bare
from tritonfp8.layers import all_or_nothing, change_class, joined_class
from tritonfp8.layers.linear import is_converted, require_module
from tritonfp8.rollout.exact.attention import NAME, NAMES, PAGED_NAME, exact_attention_forward, places_of_tokens
from tritonfp8.rollout.exact.coverage import why_not_swapped
from tritonfp8.rollout.exact.families import exact_class
from tritonfp8.rollout.exact.paged import exact_paged_attention

M = TypeVar("M", bound=nn.Module)
# A compiler's fusions otherwise keep values in float32 that single operations round to bfloat16.
EXACT_OPTIONS = {"emulate_precision_casts": True}


def make_exact(model: M) -> M:
    """Let a causal model of transformers give each token bits that depend on this token and those before it only.

    They are then the same in training, prefill and decoding: for each batch, padding, length and cache. It changes
    norms, rotary embeddings, gated MLPs, routers, attention, and linear layers that :func:`tritonfp8.convert` left in
    high precision, in place: each module, parameter and key of the state_dict stays, and the config names the attention
    ``"tritonfp8_exact"``. Layers in FP8 and experts need ``convert(..., batch_invariant=True)``, before or after it.

    What it does not know stays as it is: :func:`why_inexact` names it. A second call changes what was added since.

    Args:
        model: a causal model of transformers; it may be wrapped by DistributedDataParallel or peft, or sharded by
            FSDP2.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is no module, or has no attention that transformers lets others replace.
    """
    require_module(model)
    inner = bare(model)
    models: list[Any] = [each for each in inner.modules() if hasattr(each, "set_attn_implementation")]
    if not models:
        raise TypeError(f"a causal model of transformers is needed; got {type(inner).__name__}")
    register()
    with all_or_nothing(inner):
        for module in inner.modules():
            computes = exact_class(module)
            if computes is None or isinstance(module, computes) or is_converted(module) or why_not_swapped(module):
                continue
            change_class(module, joined_class(computes, type(module), computes.__name__))
    models[0].set_attn_implementation(NAME)
    return model


@functools.cache
def register() -> None:
    """Make the attention known to transformers, which is imported on demand."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, exact_attention_forward)
    AttentionInterface.register(PAGED_NAME, exact_paged_attention)
    AttentionMaskInterface.register(NAME, places_of_tokens)


def is_exact(model: nn.Module) -> bool:
    """Whether a model of transformers has the attention of :func:`make_exact`."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) in NAMES
