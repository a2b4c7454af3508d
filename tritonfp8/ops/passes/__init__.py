"""Rewrites of the graphs that Inductor compiles: to the same bits, with fewer launches.

Exports :func:`rewrite`, which runs all of them.
"""

from tritonfp8.ops.passes.merged_casts import merge_casts

__all__ = ["merge_casts", "rewrite"]


def rewrite(graph: object) -> int:
    """Rewrite the ``torch.fx.Graph`` of a forward, a backward or an inference in place; how many places changed."""
    return merge_casts(graph)
