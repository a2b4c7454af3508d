"""Which tile or configuration a kernel is launched with: search spaces, predictions, and what was measured.

Exports the choice of a GEMM's configuration, the tiles of the casts, and the files of tuned entries.
"""

from tritonfp8.tuning import cast_tiles, grouped_tiles, optimizer_tiles, packed_tiles, store
from tritonfp8.tuning.cast_tiles import VECTOR_BYTES, BlockShape, CastTile
from tritonfp8.tuning.chooser import (
    candidates,
    choose,
    choose_grouped,
    grouped_key,
    install,
    key,
    kind,
    on_change,
    reload,
    table,
)
from tritonfp8.tuning.kinds import Key, find
from tritonfp8.tuning.matmul_space import (
    COPY_BANDWIDTH,
    PARTIAL_BYTES,
    REDUCE_TILE,
    REDUCE_WARPS,
    MatmulConfig,
    is_widened,
    predicted_time,
    space,
)
from tritonfp8.tuning.store import Entries, Entry
