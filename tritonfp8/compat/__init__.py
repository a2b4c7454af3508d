"""What runs beneath: private names of torch, Triton and transformers, abilities of a device, counts of what ran.

Exports the versions that are supported, the modules of private names, and the delay of Ctrl-C; importing this folder
checks the installed versions and names, and mends checkpoints in graphs of torch 2.11.
"""

from tritonfp8.compat import counting, hardware, inductor_private, machine, torch_private, triton_private
from tritonfp8.compat.checkpointing import mend_checkpoints
from tritonfp8.compat.interrupts import uninterrupted
from tritonfp8.compat.transformers_names import CheckpointNames, without_fsdp
from tritonfp8.compat.versions import TRITON_OF_TORCH, triton_since

__all__ = [
    "CheckpointNames",
    "TRITON_OF_TORCH",
    "counting",
    "hardware",
    "inductor_private",
    "machine",
    "torch_private",
    "triton_private",
    "triton_since",
    "uninterrupted",
    "without_fsdp",
]

mend_checkpoints()
