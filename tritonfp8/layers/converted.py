"""Which layers of a model were converted: a module that replaced one of them later says nothing of it by itself.

The names lie on the module that was given to :func:`tritonfp8.convert`, as an attribute of plain texts. So they survive
``copy.deepcopy`` and pickles, and models that were wrapped since (DDP, ``torch.compile``, adapters) still have them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

from torch import nn

from tritonfp8.specs.naming import unwrapped

ATTRIBUTE = "_tritonfp8_converted"
_reverted: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def record_names(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Note that these layers, by their fully qualified names in ``model``, were converted."""
    model.__dict__[ATTRIBUTE] = tuple(layers)
    _reverted.difference_update(layers.values())


def forget_names(model: nn.Module, reverted: Iterable[nn.Module]) -> None:
    """Drop the records in ``model``, whose layers ``reverted`` were reverted."""
    _reverted.update(reverted)
    for module in model.modules():
        module.__dict__.pop(ATTRIBUTE, None)


def recorded_modules(model: nn.Module) -> dict[str, nn.Module | None]:
    """The module that has the name of each converted layer now, by this name; None if none has it. Names are unwrapped.

    Layers that :func:`tritonfp8.revert` reverted are left out. It is empty for a model without a record, such as one
    that was made of ``Float8Linear`` by hand.
    """
    found: dict[str, nn.Module | None] = {}
    for prefix, root in model.named_modules():
        names = root.__dict__.get(ATTRIBUTE)
        if names is None:
            continue
        now = {unwrapped(name): module for name, module in root.named_modules(remove_duplicate=False)}
        for name in names:
            module = now.get(unwrapped(name))
            if module is None or module not in _reverted:
                found[unwrapped(".".join(filter(None, (prefix, name))))] = module
    return found
