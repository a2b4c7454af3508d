"""One name of ours for each API that differs between the supported versions of Triton.

Triton 3.8 renamed the TMA copies; in 3.9 the old names only raise.
"""

import triton
import triton.language as tl
from triton.experimental.gluon.language.nvidia.hopper import tma

if hasattr(tma, "async_load"):
    tma_load, tma_store = tma.async_load, tma.async_store
else:
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global

_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
# Since Triton 3.8 loop-invariant code motion takes too many registers in some loops. On sm_90 partial maxima
# spilled 8 bytes a thread (3.8), tiles 256x128 and 128x128 of eight warps 8 to 72 (3.9). Other loops spill without it.
DISABLE_LICM: tl.constexpr = tl.constexpr(_VERSION >= (3, 8))
DISABLE_LICM_OF_TILES: tl.constexpr = tl.constexpr(_VERSION >= (3, 9))
