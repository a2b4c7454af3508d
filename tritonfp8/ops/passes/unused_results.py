"""The cast in one orientation, where nobody reads the other.

A layer casts its input in forward for backward, too. Backward of a checkpointed block casts it again, so in forward
nobody reads the transpose, or the amaxes that it needs.
"""

from __future__ import annotations

from typing import Any

import torch

from tritonfp8.ops.passes.nodes import layouts, replace

# The op with more results, and the op of its first two.
_FIRST_TWO = {
    "quantize_both": "quantize",
    "quantize_with_amax": "quantize",
    "quantize_matrices_with_amax": "quantize_matrices",
    "quantize_groups_both": "quantize_groups",
}


def drop_unused(graph: Any) -> int:
    """Replace casts where only the first two results are read; how many it replaced.

    Args:
        graph: see :func:`~tritonfp8.ops.passes.merged_casts.merge_casts`.
    """
    return sum(
        _replace_by(graph, node, getattr(torch.ops.tritonfp8, of_two).default)
        for name, of_two in _FIRST_TWO.items()
        for node in graph.find_nodes(op="call_function", target=getattr(torch.ops.tritonfp8, name).default)
        if max(_results_read(graph, node), default=2) < 2
    )


def _results_read(graph: Any, node: Any) -> list[int]:
    """Which results of a call are read; nodes that pick others are erased."""
    for user in [*node.users]:
        if not user.users:
            graph.erase_node(user)
    return [user.args[1] for user in node.users]


def _replace_by(graph: Any, node: Any, op: Any) -> bool:
    """Let ``op`` return the first two results of ``node``, unless they would have other layouts."""
    given = dict(zip((each.name for each in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
    arguments = tuple(given.get(each.name, each.default_value) for each in op._schema.arguments)
    fakes = op(*torch.fx.node.map_arg(arguments, lambda each: each.meta["val"]))
    if layouts(fakes) != layouts(node.meta["val"][:2]):
        return False
    replace(graph, node, op, arguments, fakes, (node,))
    return True
