"""What differs between the versions of Triton that we support, each under one name of ours.

Triton 3.8 renamed the TMA copies, and 3.9 turned the old names into functions that only raise.
"""

import triton
import triton.language as tl
from triton.experimental.gluon.language.nvidia.hopper import tma

if hasattr(tma, "async_load"):
    tma_load, tma_store = tma.async_load, tma.async_store
else:
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
# Since 3.8 Triton hoists out of some loops what then takes more registers than there are. On sm_90 norms and partial
# maxima spilled 8 bytes a thread (3.8), tiles 256x128 and 128x128 of eight warps 8 to 72 (3.9). Others spill without.
DISABLE_LICM: tl.constexpr = tl.constexpr(_VERSION >= (3, 8))
# Triton 3.6 does so for norms of rows of up to 4096 alone: 8 bytes.
DISABLE_LICM_OF_ROWS_OF_4096: tl.constexpr = tl.constexpr(_VERSION == (3, 6) or _VERSION >= (3, 8))
DISABLE_LICM_OF_TILES: tl.constexpr = tl.constexpr(_VERSION >= (3, 9))
