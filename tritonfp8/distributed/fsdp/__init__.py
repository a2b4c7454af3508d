"""The FP8 all-gather of FSDP2: shards are quantized, gathered in 8 bits, and read by the GEMMs without a copy.

Exports the function that turns it on, the object that gathers, the type of a gathered weight, and the weights that
FSDP2 manages.
"""

from tritonfp8.distributed.fsdp.all_gather import Float8AllGather
from tritonfp8.distributed.fsdp.enable import enable_float8_all_gather, gather_of
from tritonfp8.distributed.fsdp.gathered_weight import GatheredWeight
from tritonfp8.distributed.fsdp.torch_fsdp import Managed, managed_of, managed_parameters

__all__ = [
    "Float8AllGather",
    "GatheredWeight",
    "Managed",
    "enable_float8_all_gather",
    "gather_of",
    "managed_of",
    "managed_parameters",
]
