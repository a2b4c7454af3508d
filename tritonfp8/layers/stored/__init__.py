"""Weights that are kept as 8-bit codes and scales, without a copy in high precision: frozen weights, and inference.

    weight       StoredWeight: one copy of codes, in the order of rows, that both GEMMs of a frozen layer read
    exponents    power-of-two scales as bytes
    rows         StoredRows: the part of a weight that lies on one rank
    sharding     what tritonfp8.distributed adds for such parts
    replace      which layers can have stored weights, and the change of a model's layers

Exports the tensor type, its maker, and what ``convert``, ``swap_recipe`` and ``revert`` call.
"""

from tritonfp8.layers.stored.replace import (
    check_storable,
    check_swap,
    is_stored,
    recipe_of_storage,
    store_weights,
    weight_bytes,
)
from tritonfp8.layers.stored.rows import DTYPES, StoredRows
from tritonfp8.layers.stored.sharding import (
    StoredSharding,
    plain_weight,
    register_stored_sharding,
    stored_part,
    whole_weight,
)
from tritonfp8.layers.stored.weight import StoredWeight, read_operand, store

__all__ = [
    "DTYPES",
    "StoredRows",
    "StoredSharding",
    "StoredWeight",
    "check_storable",
    "check_swap",
    "is_stored",
    "plain_weight",
    "read_operand",
    "recipe_of_storage",
    "register_stored_sharding",
    "store",
    "store_weights",
    "stored_part",
    "weight_bytes",
    "whole_weight",
]
