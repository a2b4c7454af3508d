"""why_inexact: the modules and settings of a model whose bits may depend on the batch, with the reasons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from tritonfp8.conversion import bare, is_fsdp
from tritonfp8.layers import is_own_forward
from tritonfp8.layers.linear import is_converted, is_distributed, require_module
from tritonfp8.layers.moe import RoutedExperts, is_converted_experts
from tritonfp8.rollout.exact import families
from tritonfp8.rollout.exact.attention import NAMES
from tritonfp8.rollout.exact.families import exact_class, is_plain, role_of
from tritonfp8.rollout.exact.modules import activation_of

_AGAIN = "it sums as torch does: call make_exact, again if the module was added since"
_REPLACED = "its forward was replaced on the instance: it may compute otherwise"
# Inverse frequencies that do not depend on the length of a batch.
_FIXED_ROTARY = ("default", "linear", "llama3", "yarn", "proportional")
# They hold modules and parameters, or return what they read.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict, nn.Identity)
# What peft puts around a model and its layers, by module and name.
_AROUND = {
    ("peft.peft_model", "PeftModel"),
    ("peft.peft_model", "PeftModelForCausalLM"),
    ("peft.tuners.lora.model", "LoraModel"),
}
_ADAPTER = ("peft.tuners.lora.layer", "Linear")


def why_inexact(model: nn.Module) -> dict[str, str]:
    """The modules of a model whose bits for a token may depend on the batch, its length, padding or the cache.

    Compiled code is not seen: training needs ``torch.compile(options={"emulate_precision_casts": True})``, as a
    compiler's fusions otherwise round less often than generation does. Nor are hooks.

    Args:
        model: a causal model of transformers; it may be compiled, or wrapped by DistributedDataParallel or peft.

    Returns:
        A reason by the name of each module; empty if the model is exact.
    """
    require_module(model)
    model = bare(model)
    found: dict[str, str] = {}
    covered: set[nn.Module] = set()
    gathers = any(is_fsdp(module) for module in model.modules())
    for name, module in model.named_modules():
        if module in covered:
            continue
        reason = "tensor parallelism adds the parts of ranks" if _is_split(module, gathers) else _why(module)
        if reason is not None:
            found[name] = reason
        if is_converted_experts(module) or role_of(module)[1] in (families.MLP, families.EXPERTS):
            # The reason of its parent holds for it, and an exact one does not call it.
            covered |= {child for key, child in module.named_children() if key == "act_fn"}
    return found


def _why(module: Any) -> str | None:
    """The reason why a module is not exact, without the modules inside of it; None if it is."""
    if not is_own_forward(module):
        return _REPLACED
    if is_converted(module):
        return _why_layer(module)
    if is_converted_experts(module):
        return _why_experts(module)
    if isinstance(module, _CONTAINERS):
        return None
    if isinstance(module, nn.Dropout):
        return None if module.p == 0 else f"dropout ({module.p}) changes training only: set it to 0"
    return next(_reasons(module), None)


def _why_layer(layer: Any) -> str | None:
    if layer.recipe.output.batch_invariant:
        return None
    return f"its recipe {layer.recipe.name!r} is not batch-invariant: {_CONVERT}"


_CONVERT = "use tritonfp8.convert(model, ..., batch_invariant=True)"


def _is_split(module: Any, gathers: bool) -> bool:
    """Whether forward reads a part of a parameter. FSDP2, which shards one mesh dim, gathers the whole."""
    sharded = [p for p in module.parameters(recurse=False) if is_distributed(p)]
    return any(not gathers or len(p.placements) > 1 for p in sharded)


def _why_experts(experts: Any) -> str | None:
    if not isinstance(experts, RoutedExperts):
        return f"experts of this kind ({type(experts).__name__}) add in the order of their own forward"
    if not experts.recipe.output.batch_invariant:
        return f"their recipe {experts.recipe.name!r} is not batch-invariant: {_CONVERT}"
    if experts.dispatch is not None:
        return "expert parallelism adds the parts of ranks"
    return None if experts.is_swiglu else "their activation is not SwiGLU, the only one with an op"


def _reasons(module: Any) -> Iterator[str]:
    """What is wrong with a module that no recipe computes."""
    family, role = role_of(module)
    computes = exact_class(module)
    if computes is not None and not isinstance(module, computes):
        yield why_not_swapped(module) or _AGAIN
    if role == families.ATTENTION:
        yield from _of_attention(module)
    elif role == families.EXPERTS:
        yield f"experts in high precision add in the order of routing: {_CONVERT}"
    elif computes is None and not _is_known(module, family, role):
        yield f"{type(module).__name__} of {type(module).__module__} is not known: it may sum over other rows"
    yield from _of_settings(module, family, role)


def why_not_swapped(module: Any) -> str | None:
    """The reason why a module with an :func:`exact_class` must keep its class, or None."""
    role = role_of(module)[1]
    if not is_own_forward(module):
        return _REPLACED
    if role == families.MLP and not activation_of(module.act_fn):
        return f"its activation {type(module.act_fn).__name__} is not known"
    if role == families.ROTARY:
        kinds = module.rope_type if isinstance(module.rope_type, dict) else {"": module.rope_type}
        if odd := [kind for kind in kinds.values() if kind not in _FIXED_ROTARY]:
            return f"rotary embeddings of kind {odd[0]!r} depend on the length of the batch"
    return None


def _is_known(module: nn.Module, family: str, role: str) -> bool:
    if is_plain(family, role) or type(module) is nn.Embedding or _is_exact(module):
        return True
    names = {(cls.__module__, cls.__name__) for cls in type(module).__mro__}
    return bool(names & _AROUND) or (type(module).__module__, type(module).__name__) == _ADAPTER


def _is_exact(module: nn.Module) -> bool:
    return any(cls.__module__ == "tritonfp8.rollout.exact.modules" for cls in type(module).__mro__)


def _of_attention(module: Any) -> Iterator[str]:
    config = module.config
    if config._attn_implementation not in NAMES:
        yield f"its attention is {config._attn_implementation!r}: call make_exact"
    if getattr(module, "attention_dropout", None):
        yield f"dropout of attention ({module.attention_dropout}) changes training only: set attention_dropout to 0"
    if not getattr(module, "is_causal", True):
        yield "it is not causal: a token reads later ones"
    if getattr(module, "attn_logit_softcapping", None):
        yield "it caps scores, which exact attention does not"


def _of_settings(module: Any, family: str, role: str) -> Iterator[str]:
    config = getattr(module, "config", None)
    if role == "ForCausalLM" and getattr(config, "final_logit_softcapping", None):
        yield "its logits are capped by tanh, whose bits differ in compiled code"
    if role == "SparseMoeBlock" and getattr(module, "jitter_noise", None):
        yield f"noise on routers (router_jitter_noise={module.jitter_noise}) changes training only: set it to 0"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        yield "an embedding with max_norm changes its weight in forward"
    if (type(module).__module__, type(module).__name__) == _ADAPTER and module.lora_variant:
        yield "a variant of LoRA (such as DoRA) sums in its own order"
