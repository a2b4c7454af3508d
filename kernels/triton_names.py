"""The names of Triton that differ between the versions we support, each under one name of ours.

Triton 3.8 named the TMA copies anew, and 3.9 turned the old names into functions that only raise.
"""

from triton.experimental.gluon.language.nvidia.hopper import tma

if hasattr(tma, "async_load"):
    tma_load, tma_store = tma.async_load, tma.async_store
else:
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
