"""Other libraries: FLOP counters learn what a converted layer is, and other FP8 libraries do not take its place.

``convert_to_float8_training`` of torchao takes every subclass of ``nn.Linear``, and accelerate calls it, or the same of
TransformerEngine, for ``mixed_precision="fp8"``. The layers would lose their recipes without a word, and an optimizer
that was made before would step weights that no layer reads. torch's own FLOP counter is taught in ``ops/flops.py``.
"""

from __future__ import annotations

import functools
import sys

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from tritonfp8.layers.linear import Float8Linear, is_converted

# By module: its table, the entry of a plain layer, and the key that gets the same entry. thop goes by the class of a
# module; fvcore by the ops of a trace, in which a converted layer is one op with the arguments of aten::linear.
TABLES: dict[str, tuple[str, object, object]] = {
    "thop.profile": ("register_hooks", nn.Linear, Float8Linear),
    "fvcore.nn.flop_count": ("_DEFAULT_SUPPORTED_OPS", "aten::linear", "tritonfp8::whole_linear"),
}
_OTHERS = {
    "torchao": "torchao",
    "transformer_engine": "TransformerEngine",
    "intel_transformer_engine": "TransformerEngine",
    "msamp": "MS-AMP",
}


def teach_counters() -> None:
    """Add converted layers to the tables of counters that are imported already; others are not imported for this."""
    for module, (attribute, plain, ours) in TABLES.items():
        table = getattr(sys.modules.get(module), attribute, None)
        if isinstance(table, dict) and plain in table:
            table.setdefault(ours, table[plain])


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
