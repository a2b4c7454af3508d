"""What differs between the versions of Triton that we support, each under one name of ours.

Triton 3.8 named the TMA copies anew, and 3.9 turned the old names into functions that only raise.
"""

import triton
import triton.language as tl
from triton.experimental.gluon.language.nvidia.hopper import tma

if hasattr(tma, "async_load"):
    tma_load, tma_store = tma.async_load, tma.async_store
else:
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

# Triton 3.9 hoists out of the loops of tiled products what then takes more registers than there are: tiles 256x128 and
# 128x128 of eight warps spilled 8 to 72 bytes a thread on sm_90, and none with this.
DISABLE_LICM: tl.constexpr = tl.constexpr(tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 9))
