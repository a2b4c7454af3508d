"""The FP8 all-gather of FSDP2: shards are quantized, gathered in 8 bits, and read by the GEMMs without a copy.

Exports the function that turns it on and the type of a gathered weight with the provider of its operands.
"""

from tritonfp8.distributed.fsdp.enable import enable_float8_all_gather
from tritonfp8.distributed.fsdp.gathered_weight import GatheredWeight, GatheredWeightOperands

__all__ = [
    "GatheredWeight",
    "GatheredWeightOperands",
    "enable_float8_all_gather",
]
