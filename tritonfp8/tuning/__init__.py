"""Which tile or configuration a kernel is launched with: search spaces, predictions, and what was measured.

Exports the choice of a GEMM's configuration, the tiles of the casts, and the files of tuned entries.
"""

from tritonfp8.tuning import cast_tiles, store
from tritonfp8.tuning.cast_tiles import VECTOR_BYTES, CastTile
from tritonfp8.tuning.chooser import candidates, choose, install, key, kind, on_change, reload, table
from tritonfp8.tuning.matmul_space import PARTIAL_BYTES, MatmulConfig, find, space
from tritonfp8.tuning.store import Entries, Entry, Key

__all__ = [
    "PARTIAL_BYTES",
    "VECTOR_BYTES",
    "CastTile",
    "Entries",
    "Entry",
    "Key",
    "MatmulConfig",
    "candidates",
    "cast_tiles",
    "choose",
    "find",
    "install",
    "key",
    "kind",
    "on_change",
    "reload",
    "space",
    "store",
    "table",
]
