"""Layers that stay in high precision by default: output heads, routers of experts, adapters, and what a model keeps in
float32.

A head's logits decide the loss, and a router's the experts: both are sensitive to rounding and cheap. An adapter has a
few features, and FP8 would make it slower. They are recognized by name and place, as nothing in a layer tells its role.
Models of transformers and diffusers list the names of what they load in float32, such as the layer by which the
attention of DeepSeek-V3.2 chooses its tokens; quantizers of transformers leave these layers as they are, too.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from torch import nn

HEADS = {"lm_head", "embed_out"}
HEAD = "an output head"
# Also the names of ordinary layers: heads only at the top of a model, or beside an embedding of as many rows.
HEADS_BY_PLACE = {"output", "score"}
ROUTERS = {"gate", "router"}
ADAPTER = re.compile(r"lora_\w*")
# A router maps to as many features as there are experts: far fewer than its input has.
ROUTER_RATIO = 4
# What wrappers put into a name: torch.compile, FSDP1, checkpointing, DDP, peft.
WRAPPERS = {
    "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module", "base_layer", "original_module",
}  # fmt: skip
# peft appends the name of an adapter to this.
COPIES = "modules_to_save"
# The lists of transformers and diffusers: parts of the names of parameters.
KEPT_IN_FLOAT32 = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


class Role(NamedTuple):
    """Why a layer stays in high precision, and the part of its name that a pattern must have to include it."""

    what: str
    part: str

    @property
    def is_head(self) -> bool:
        """Whether the layer is an output head."""
        return self.what.startswith(HEAD)

    def reason(self, name: str) -> str:
        """The entry of a report for the layer ``name``."""
        pattern = f"*{self.part}" if name.endswith(self.part) else f"*.{self.part}.*"
        return f"{self.what}, in high precision unless a pattern names it, such as {pattern!r}"


class Roles:
    """Finds the roles of the linear layers of ``model``."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.embeddings = {
            id(module.weight): f"{name}.weight"
            for name, module in self.modules.items()
            if isinstance(module, nn.Embedding)
        }
        self.kept = {name: kept for name, module in self.modules.items() if (kept := kept_in_float32(module))}

    def of(self, name: str, layer: nn.Module, in_features: int, out_features: int) -> Role | None:
        """The role of the layer ``name``, or None for an ordinary layer."""
        path = _unwrapped(name)
        if not path:
            return None
        adapter = next((part for part in path if ADAPTER.fullmatch(part.lower())), None)
        if adapter is not None:
            return Role("an adapter", adapter)
        if (embedding := self.embeddings.get(id(layer._parameters.get("weight")))) is not None:
            return Role(f"{HEAD} (its weight is {embedding})", path[-1])
        if self._is_head(path, name, out_features):
            return Role(HEAD, path[-1])
        if self._is_router(path, name, in_features, out_features):
            return Role("a router", path[-1] if path[-1] in ROUTERS else path[-2])
        return self.kept_by_a_model(name)

    def kept_by_a_model(self, name: str) -> Role | None:
        """The role of a layer that a module around it keeps in float32, or None."""
        for prefix, kept in self.kept.items():
            if not prefix or name.startswith(f"{prefix}."):
                weight = ".".join([*_unwrapped(name.removeprefix(prefix)), "weight"])
                for attribute, key in kept:
                    # Whole parts: "wo" is no part of "word".
                    if re.search(rf"(^|\.){re.escape(key)}(\.|$)", weight):
                        part = key.removesuffix(".weight").rpartition(".")[2]
                        return Role(f"a layer that its model lists in {attribute}", part)
        return None

    def _parent(self, path: list[str], name: str) -> nn.Module:
        parts = name.split(".")
        # The last place, as a parent may have the same name.
        at = len(parts) - 1 - parts[::-1].index(path[-1])
        return self.modules[".".join(parts[:at])]

    def _is_head(self, path: list[str], name: str, out_features: int) -> bool:
        if path[-1] not in HEADS_BY_PLACE:
            return path[-1] in HEADS
        parent = self._parent(path, name)
        # As transformers names models with a head: LlamaForCausalLM, LlamaForSequenceClassification.
        is_top = len(path) == 1 or re.search(r"For[A-Z]", type(parent).__name__) is not None
        rows = (module.num_embeddings for module in parent.modules() if isinstance(module, nn.Embedding))
        return is_top or out_features in rows

    def _is_router(self, path: list[str], name: str, in_features: int, out_features: int) -> bool:
        if not ROUTERS & set(path[-2:]):
            return False
        siblings = self._parent(path, name)._modules
        if any("expert" in sibling for sibling in siblings):
            return True
        # The gate of a SwiGLU is as large as the layer that it gates.
        linears = [layer for layer in siblings.values() if isinstance(layer, nn.Linear)]
        alike = sum((layer.in_features, layer.out_features) == (in_features, out_features) for layer in linears)
        return alike < 2 and out_features * ROUTER_RATIO <= in_features


def kept_in_float32(module: nn.Module) -> list[tuple[str, str]]:
    """What a module lists to be kept in float32: the list, and an entry."""
    # A model of transformers joins the lists of its parts in a set.
    return [(each, key) for each in KEPT_IN_FLOAT32 for key in sorted(getattr(module, each, None) or ())]


def _unwrapped(name: str) -> list[str]:
    parts = name.split(".")
    if COPIES in parts:
        parts = parts[: parts.index(COPIES)]
    return [part for part in parts if part and part not in WRAPPERS]
