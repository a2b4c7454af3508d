"""The only place where ops are registered with torch.

Exports each op by its name (``ops.quantize``), the table of their rows (:data:`OPS`), and what code needs while a graph
is traced.
"""

from typing import TYPE_CHECKING, Any

from tritonfp8.launch import ALIGNMENT
from tritonfp8.ops import flops, graph_op
from tritonfp8.ops.batching import each_sample
from tritonfp8.ops.direct import CALLS
from tritonfp8.ops.dispatch import chain_of
from tritonfp8.ops.registry import NAMESPACE, OPS, implement, overload, saved
from tritonfp8.ops.sharding import Operand, Rule
from tritonfp8.ops.shards import GridPlace, casts_shards, places_to_read, places_to_write
from tritonfp8.ops.tracing import is_exporting, is_traced, sealed
from tritonfp8.reference import rounding_keys

globals().update({name: overload(name) for name in OPS})

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """An op by its name."""
