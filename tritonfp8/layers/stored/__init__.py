"""Weights that are kept as 8-bit codes and scales, without a copy in high precision: frozen weights, and inference.

    weight       StoredWeight: one copy of codes, in the order of rows, that both GEMMs of a frozen layer read
    replace      which layers can have stored weights, and the change of a model's layers

Exports the tensor type, its maker, and what ``convert``, ``swap_recipe`` and ``revert`` call.
"""

from tritonfp8.layers.stored.replace import (
    check_storable,
    check_swap,
    is_stored,
    plain_weight,
    recipe_of_storage,
    store_weights,
    weight_bytes,
)
from tritonfp8.layers.stored.weight import StoredWeight, store

__all__ = [
    "StoredWeight",
    "check_storable",
    "check_swap",
    "is_stored",
    "plain_weight",
    "recipe_of_storage",
    "store",
    "store_weights",
    "weight_bytes",
]
