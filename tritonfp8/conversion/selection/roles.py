"""Layers that stay in high precision by default: output heads, routers of experts, adapters, conditioning layers, and
what a model keeps in float32.

A head's logits decide the loss, and a router's the experts: both are sensitive to rounding and cheap. An adapter has a
few features, and FP8 would make it slower. What the model tells of its heads counts first (:mod:`.heads`). All else is
recognized by name and place, as nothing in a layer tells its role.
A conditioning layer reads a timestep, a label or a pooled text: a row an image, where other layers read a row a token.
So its GEMMs are too small to get faster. Its output scales and shifts all tokens of the image, and rounding it moves
them all alike. A block of DiT has a third of its weights there.
Models of transformers and diffusers list the names of what they load in float32, such as the layer by which the
attention of DeepSeek-V3.2 chooses its tokens; quantizers of transformers leave these layers as they are, too.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from torch import nn

from tritonfp8.conversion.selection.heads import COPIES, WITH_HEAD, WRAPPERS, last_linears, told_heads

HEADS = {"lm_head", "embed_out"}
HEAD = "an output head"
CONDITION = "a conditioning layer"
# Also the names of ordinary layers: heads only at the top of a model, or beside an embedding of as many rows.
HEADS_BY_PLACE = {"output", "score", "head", "heads", "classifier", "logits"}
# The last layer of a model of diffusers; their blocks have layers of that name, too.
OUTPUT_OF_DIFFUSERS = re.compile(r"proj_out(_\d+)?")
ROUTERS = {"gate", "router"}
ADAPTER = re.compile(r"lora_\w*")
# Names in diffusers, transformers and the code of papers. A bare "modulation" is also an ordinary layer (FocalNet).
CONDITIONING = re.compile(
    r"(t|time|timestep|time_step|guidance)_(\w+_)?(emb|proj)\w*|add_embedding|adaln\w*|\w+_modulation(_\w+)?|(img|txt)_mod"
)
# A linear layer directly inside of a norm computes its scale and shift: norm1.linear of AdaLayerNormZero.
NORM = re.compile(r"(\w+_)?norm(_\w+|\d\w*)?")
# A router maps to as many features as there are experts: far fewer than its input has.
ROUTER_RATIO = 4
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
        before = "*" if name.startswith(self.part) else "*."
        pattern = f"*{self.part}" if name.endswith(self.part) else f"{before}{self.part}.*"
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
        self.told = told_heads(model)
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
            return Role(f"{HEAD} (its weight is {embedding})", _part(path))
        if layer in self.told:
            return Role(f"{HEAD} ({self.told[layer]})", _part(path))
        if self._is_head(path, name, layer, out_features):
            return Role(HEAD, _part(path))
        if self._is_router(path, name, in_features, out_features):
            return Role("a router", path[-1] if path[-1] in ROUTERS else path[-2])
        return self.kept_by_a_model(name) or _conditioning(path)

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

    def _is_head(self, path: list[str], name: str, layer: nn.Module, out_features: int) -> bool:
        for length, part in enumerate(path, 1):
            around = self.modules[self._until(path[:length], name)] if length < len(path) else layer
            if part not in HEADS | HEADS_BY_PLACE and not OUTPUT_OF_DIFFUSERS.fullmatch(part):
                continue
            if layer in last_linears(around) and self._is_place(path[:length], name, out_features):
                # Beside a head that the model tells, a block of such a name prepares its input.
                return length == len(path) or not self._tells(self._until(path[:length], name).rpartition(".")[0])
        return False

    def _tells(self, name: str) -> bool:
        """Whether a module tells of a head in it."""
        return any(layer in self.told for layer in self.modules[name].modules())

    def _until(self, path: list[str], name: str) -> str:
        """The name of the module at ``path``, as :func:`_unwrapped` gives it, on the way to the layer ``name``."""
        parts = name.split(".")
        return next(found for i in range(len(parts)) if _unwrapped(found := ".".join(parts[: i + 1])) == path)

    def _is_place(self, path: list[str], name: str, out_features: int) -> bool:
        """Whether a module of such a name is a head at this place."""
        if path[-1] in HEADS or len(path) == 1:
            return True
        parent = self.modules[self._until(path, name).rpartition(".")[0]]
        if OUTPUT_OF_DIFFUSERS.fullmatch(path[-1]):
            # Transformers inside of a UNet are models, too: their last layers are ordinary ones.
            parts = name.split(".")
            around = (self.modules[".".join(parts[:i])] for i in range(len(parts)))
            return next((each is parent for each in around if _is_model_of_diffusers(each)), False)
        rows = (module.num_embeddings for module in parent.modules() if isinstance(module, nn.Embedding))
        return WITH_HEAD.search(type(parent).__name__) is not None or out_features in rows

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


def _part(path: list[str]) -> str:
    """The part of a name that tells a head: a number in a list tells nothing."""
    return next((part for part in reversed(path) if not part.isdigit()), path[-1])


def _is_model_of_diffusers(module: nn.Module) -> bool:
    mixins = (cls for cls in type(module).__mro__ if cls.__name__ == "ModelMixin")
    return any(cls.__module__.partition(".")[0] == "diffusers" for cls in mixins)


def _conditioning(path: list[str]) -> Role | None:
    """The role of a layer that reads a row an image, or None."""
    named = next((part for part in path if CONDITIONING.fullmatch(part.lower())), None)
    of_norm = path[-2] if len(path) > 1 and NORM.fullmatch(path[-2].lower()) else None
    part = named or of_norm
    return None if part is None else Role(f"{CONDITION} (a row an image)", part)


def kept_in_float32(module: nn.Module) -> list[tuple[str, str]]:
    """What a module lists to be kept in float32: the list, and an entry."""
    # A model of transformers joins the lists of its parts in a set.
    return [(each, key) for each in KEPT_IN_FLOAT32 for key in sorted(getattr(module, each, None) or ())]


def _unwrapped(name: str) -> list[str]:
    parts = name.split(".")
    if COPIES in parts:
        parts = parts[: parts.index(COPIES)]
    return [part for part in parts if part and part not in WRAPPERS]
