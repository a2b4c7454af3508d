"""What is known of the modules of transformers' causal models: by the family, and the end of the name of a class."""

from __future__ import annotations

from torch import nn

from tritonfp8.rollout.exact.modules import (
    ExactLinear,
    ExactMLP,
    ExactRMSNorm,
    ExactRotary,
    ExactRoundedRouter,
    ExactRouter,
    ExactUnitOffsetNorm,
)

# By the folder of a family: what the names of its classes begin with.
PREFIXES = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma": "Gemma", "gemma3": "Gemma3",
    "mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe", "olmoe": "Olmoe",
}  # fmt: skip
NORM, MLP, ROTARY, ROUTER, ATTENTION, EXPERTS = (
    "RMSNorm", "MLP", "RotaryEmbedding", "TopKRouter", "Attention", "Experts",
)  # fmt: skip
# They call other modules, add, look up, reshape: operations whose results do not depend on other rows.
_PLAIN = ("DecoderLayer", "Model", "ForCausalLM", "SparseMoeBlock", "TextScaledWordEmbedding")
# Gemma3's Model also reads images.
_PLAIN_OF = {"gemma3": ("DecoderLayer", "TextModel", "ForCausalLM", "TextScaledWordEmbedding")}
_UNIT_OFFSET = ("gemma", "gemma3")
_FLOAT32_WEIGHTS = ("mixtral",)


def role_of(module: nn.Module) -> tuple[str, str]:
    """The family of a module, and the end of the name of its class; empty texts for an unknown class.

    The class may have been derived from since, as ``fully_shard`` and :func:`make_exact` do.
    """
    for cls in type(module).__mro__:
        parts = cls.__module__.split(".")
        if parts[:2] != ["transformers", "models"] or len(parts) != 4 or parts[3] != f"modeling_{parts[2]}":
            continue
        prefix = PREFIXES.get(parts[2])
        if prefix is not None and cls.__name__.startswith(prefix):
            return parts[2], cls.__name__.removeprefix(prefix)
        return "", ""
    return "", ""


def is_plain(family: str, role: str) -> bool:
    """Whether modules of this role compute nothing that depends on other rows."""
    return role in _PLAIN_OF.get(family, _PLAIN)


def exact_class(module: nn.Module) -> type[nn.Module] | None:
    """The class that computes what ``module`` does, in an order that does not depend on other rows; None if none does.

    Converted layers, and all that :func:`is_plain` knows, keep their classes.
    """
    # fully_shard derives classes with the forward of the layer.
    if getattr(type(module), "forward", None) in (nn.Linear.forward, ExactLinear.forward):
        return ExactLinear
    family, role = role_of(module)
    if role == NORM:
        return ExactUnitOffsetNorm if family in _UNIT_OFFSET else ExactRMSNorm
    if role == ROUTER:
        return ExactRouter if family in _FLOAT32_WEIGHTS else ExactRoundedRouter
    return {MLP: ExactMLP, ROTARY: ExactRotary}.get(role)
