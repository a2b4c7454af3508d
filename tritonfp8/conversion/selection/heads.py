"""The output heads that the modules of a model tell, before any name is read.

transformers, and what follows its protocol, has ``get_output_embeddings``, ``_tied_weights_keys`` and a ``config`` with
``num_labels`` and ``vocab_size``; timm has ``get_classifier``. Modules inside others are asked, too: wrappers of peft,
the language model of a vision-language model, a model that is an attribute of the user's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from tritonfp8.layers.linear import is_conv1d
from tritonfp8.specs.naming import INSERTED

# What wrappers put into a name: torch.compile, FSDP1, checkpointing, DDP, peft.
WRAPPERS = {*INSERTED, "module", "base_layer", "original_module"}
# peft appends the name of an adapter to this.
COPIES = "modules_to_save"
ASKED = ("get_output_embeddings", "get_classifier")
SIZES = ("num_labels", "vocab_size")
# As transformers names models with a head: LlamaForCausalLM, LlamaForSequenceClassification.
WITH_HEAD = re.compile("For[A-Z]")
# Inside a base model the number of features does not make a layer a head: it needs a head's name, too.
NAMED_AS_HEAD = re.compile(r"(head|class|score|logit|final)\w*(\.\d+)?$|\.out$")


def told_heads(model: nn.Module) -> dict[nn.Module, str]:
    """The linear layers that a module of ``model`` says are output heads, each with what says so."""
    found: dict[nn.Module, str] = {}
    for module in model.modules():
        for layer, why in (*_asked(module), *_tied(module), *_of_labels(module)):
            found.setdefault(layer, why)
    return found


def is_linear(module: Any) -> bool:
    """Whether a module is a linear layer of any kind."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def last_linears(module: Any) -> list[nn.Module]:
    """The linear layers by which a head ends: itself, the last one in it, or the last one of each head in a list."""
    if isinstance(module, list | tuple | nn.ModuleList):
        return [layer for each in module for layer in last_linears(each)]
    if isinstance(module, nn.ModuleDict):
        return last_linears(list(module.values()))
    if not isinstance(module, nn.Module):
        return []
    # Not the adapter beside a layer.
    if wrapped := [each for name, each in module._modules.items() if name in WRAPPERS or name == COPIES]:
        return last_linears(wrapped)
    return [each for each in module.modules() if is_linear(each)][-1:]


def _asked(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for name in ASKED:
        # Of the class: wrappers hand on the attributes of a model that is asked itself.
        if not callable(getattr(type(module), name, None)):
            continue
        try:
            told = getattr(module, name)()
        except Exception:
            # A model without a head may raise anything.
            continue
        yield from ((layer, f"by {name} of {type(module).__name__}") for layer in last_linears(told))


def _tied(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Layers whose weight would be an embedding's if the config said so."""
    keys = getattr(module, "_tied_weights_keys", None)
    if not keys or not isinstance(keys, dict | list | tuple | set):
        return
    owners = [(f"{name}.weight", each) for name, each in module.named_modules()]
    targets = [(name, each) for name, each in owners if is_linear(each)]
    embeddings = [name for name, each in owners if isinstance(each, nn.Embedding)]
    for key in keys:
        source = keys[key] if isinstance(keys, dict) else None
        if source is None or any(_matches(source, name) for name in embeddings):
            why = f"by _tied_weights_keys of {type(module).__name__}"
            yield from ((each, why) for name, each in targets if _matches(key, name))


def _matches(key: str, name: str) -> bool:
    return key == name or re.search(rf"(^|\.)(?:{key.removeprefix('^')})$", name) is not None


def _of_labels(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Layers of a model with a head that have as many features as there are labels, outside of its base model."""
    config, base = getattr(module, "config", None), getattr(module, "base_model_prefix", None)
    if config is None or not isinstance(base, str) or not WITH_HEAD.search(type(module).__name__):
        return
    sizes = {size: what for what, size in _sizes(config) if size > 0}
    for name, layer in module.named_modules():
        place, _, inside = name.partition(".")
        # Without a base model anything may lie below its own layers.
        outside = place != base and (base in module._modules or not inside)
        named = NAMED_AS_HEAD.search(name) is not None
        if not isinstance(layer, nn.Linear) or not (outside or named):
            continue
        # A head of several channels has the words of each.
        of = (
            what
            for size, what in sizes.items()
            if layer.out_features == size or (named and what == "vocab_size" and layer.out_features % size == 0)
        )
        if told := next(of, None):
            yield layer, f"its features are {told} of the config"


def _sizes(config: Any) -> Iterable[tuple[str, int]]:
    parts = [config, *(part for part in vars(config).values() if hasattr(part, "model_type"))]
    for part in parts:
        for name in SIZES:
            if type(size := getattr(part, name, None)) is int:
                yield name, size
