"""Refuse that another FP8 library takes the place of a converted layer.

``convert_to_float8_training`` of torchao takes every subclass of ``nn.Linear``, and accelerate calls it, or the same of
TransformerEngine, for ``mixed_precision="fp8"``. The layers would lose their recipes without a word, and an optimizer
that was made before would step weights that no layer reads.
"""

from __future__ import annotations

import functools

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from tritonfp8.layers.linear import is_converted

_OTHERS = {
    "torchao": "torchao",
    "transformer_engine": "TransformerEngine",
    "intel_transformer_engine": "TransformerEngine",
    "msamp": "MS-AMP",
}


def _refuse(parent: nn.Module, name: str, new: nn.Module | None) -> None:
    other = _OTHERS.get(type(new).__module__.partition(".")[0])
    old = parent._modules.get(name)
    if other is not None and old is not None and is_converted(old):
        raise TypeError(
            f"{name} of {type(parent).__name__} follows the recipe {old.recipe.name!r} of tritonfp8, and {other} would "
            f"replace it by a {type(new).__name__} of its own. With accelerate set mixed_precision='bf16' in place of "
            "'fp8'; else leave the layer out of one of them by its filter, or call tritonfp8.revert first"
        )


@functools.cache
def keep_layers() -> None:
    """From now on refuse that another FP8 library replaces a converted layer of any model."""
    register_module_module_registration_hook(_refuse)
