"""Teach the FLOP counters of others that a converted layer is a linear layer; torch's is taught in ``ops/flops.py``."""

from __future__ import annotations

import sys

from torch import nn

from tritonfp8.layers.linear import Float8Linear

# By module: its table, the entry of a plain layer, and the key that gets the same entry. thop goes by the class of a
# module; fvcore by the ops of a trace, in which a converted layer is one op with the arguments of aten::linear.
TABLES: dict[str, tuple[str, object, object]] = {
    "thop.profile": ("register_hooks", nn.Linear, Float8Linear),
    "fvcore.nn.flop_count": ("_DEFAULT_SUPPORTED_OPS", "aten::linear", "tritonfp8::whole_linear"),
}


def teach_counters() -> None:
    """Add converted layers to the tables of counters that are imported already; others are not imported for this."""
    for module, (attribute, plain, ours) in TABLES.items():
        table = getattr(sys.modules.get(module), attribute, None)
        if isinstance(table, dict) and plain in table:
            table.setdefault(ours, table[plain])
