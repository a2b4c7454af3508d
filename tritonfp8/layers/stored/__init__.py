"""Weights that are kept as 8-bit codes and scales, without a copy in high precision: frozen ones, and trained ones.

    weight       StoredWeight: one copy of codes, in the order of rows, that both GEMMs of a frozen layer read
    views        ValuesView: views of the values of a whole weight, which write through
    matrices     StoredMatrices: the weights of experts, [E, N, K]
    rows         StoredRows: the part of a weight that lies on one rank; power-of-two scales as bytes
    shard        what parts of weights have: FSDP2 gathers their bytes, and cuts them
    sharding     what is read and written of parts by way of tritonfp8.distributed
    base         what all tensors of codes have: gradients of reads, and what other programs do with a Parameter
    direct       operations of others on the values
    update       what an optimizer reads and writes
    storable     which layers can have stored weights
    replace      the change of a model's layers

Exports the tensor type, its maker, and what ``convert``, ``swap_recipe`` and ``revert`` call.
"""

from tritonfp8.layers.stored.base import DTYPES, CodesTensor, decomposed, replacing
from tritonfp8.layers.stored.direct import DirectSteps, direct_steps
from tritonfp8.layers.stored.matrices import MatricesShard, StoredMatrices
from tritonfp8.layers.stored.replace import (
    check_swap,
    is_stored,
    restore_plain,
    store_weights,
    stored_as_layer,
    taken,
    weight_bytes,
)
from tritonfp8.layers.stored.rows import StoredRows, exponents_of, scales_of
from tritonfp8.layers.stored.sharding import (
    copy_whole,
    plain_weight,
    stored_part,
    whole_weight,
)
from tritonfp8.layers.stored.storable import (
    check_storable,
    check_trainable,
    names_of_weights,
    recipe_of_storage,
    why_experts_stay,
)
from tritonfp8.layers.stored.update import (
    StoredPart,
    distribute,
    gradient_of,
    part_to_update,
    starts_of,
    whole_amaxes,
    write_values,
)
from tritonfp8.layers.stored.weight import StoredWeight, store
