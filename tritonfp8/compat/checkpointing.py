"""Recompute what autograd functions compute in compiled checkpoints, which torch 2.11 saves.

In a graph a checkpoint marks the nodes that backward computes again. Torch 2.11 leaves the nodes inside an autograd
function unmarked, so a checkpointed block would keep the result of each of its FP8 GEMMs. Torch 2.13 marks them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version

_MARKS = ("ac_graph_id", "recompute")
_OPS = ("call_function", "call_method", "call_module")
_FUNCTION = "autograd_function_apply"
_OURS = "tritonfp8."


def _mark_inside(graph_module: Any) -> None:
    """Give the nodes of our autograd functions the marks of the calls of these functions, in ``graph_module``."""
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or getattr(node.target, "__name__", "") != _FUNCTION:
            continue
        # Backward, the second body, is never computed again.
        body = getattr(graph_module, node.args[0].target)
        inside = [each for each in body.graph.nodes if each.op in _OPS]
        if any(str(each.target).startswith(_OURS) for each in inside):
            for each in inside:
                each.meta.update({name: node.meta[name] for name in _MARKS})
            _mark_inside(body)


def marking_inside(tag_nodes: Callable[..., Any]) -> Callable[..., Any]:
    """``tag_nodes``, which marks the nodes of a checkpoint, followed by the nodes inside our autograd functions.

    Selective checkpointing asks its policy for each op, inside of autograd functions too: nothing is missing there.
    """

    @functools.wraps(tag_nodes)
    def marked(gmod: Any, is_sac: bool) -> Any:
        found = tag_nodes(gmod, is_sac)
        if not is_sac:
            _mark_inside(found)
        return found

    return marked


def mend_checkpoints() -> None:
    """Let this torch mark the nodes inside our autograd functions, if it does not."""
    if Version(torch.__version__) >= Version("2.13"):
        return
    from torch._higher_order_ops import wrap

    owner: Any = wrap.TagActivationCheckpoint
    tag_nodes = getattr(owner, "tag_nodes", None)
    if tag_nodes is not None and not hasattr(tag_nodes, "__wrapped__"):
        owner.tag_nodes = staticmethod(marking_inside(tag_nodes))
