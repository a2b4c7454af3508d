"""The FP8 all-gather of FSDP2: shards are quantized, gathered in 8 bits, and read by the GEMMs without a copy.

Exports the function that turns it on, the type of a gathered weight with the provider of its operands, and the weights
that FSDP2 manages.
"""

from tritonfp8.distributed.fsdp.enable import enable_float8_all_gather, gather_of
from tritonfp8.distributed.fsdp.gathered_weight import GatheredWeight
from tritonfp8.distributed.fsdp.torch_fsdp import Managed, all_managed, managed_of, managed_weights

__all__ = [
    "GatheredWeight",
    "Managed",
    "all_managed",
    "enable_float8_all_gather",
    "gather_of",
    "managed_of",
    "managed_weights",
]
