"""Rewrites of the graphs that Inductor compiles: to the same bits, with fewer launches and less memory.

Exports :func:`rewrite`, which runs all of them but for :func:`join_chains`: who calls an op does not see the ops of a
chain, so graphs have chains only where their code calls functions.
"""

from typing import Any

from tritonfp8.ops.passes.batched_weights import batch_weights, may_batch
from tritonfp8.ops.passes.cast_order import order_casts
from tritonfp8.ops.passes.chains import MOST_WORK, join_chains
from tritonfp8.ops.passes.merged_casts import merge_casts, read_codes, read_sources
from tritonfp8.ops.passes.unused_results import drop_unused

__all__ = ["MOST_WORK", "join_chains", "may_batch", "rewrite"]


def rewrite(graph: Any) -> int:
    """Rewrite the ``torch.fx.Graph`` of a forward, a backward or an inference in place; how many places changed."""
    first = drop_unused(graph) + read_sources(graph)
    return first + merge_casts(graph) + read_codes(graph) + batch_weights(graph) + order_casts(graph)
