"""One op for the two casts of a matrix that a graph casts untransposed in one place and transposed in another.

A layer in a compiled graph asks for the transposed cast of its input in backward, where it may be cheaper to compute
than to keep (:func:`tritonfp8.layers.linear.function.recomputable`). The partitioner decides. Where it puts that cast
into forward after all, forward has both casts, and each reads the whole matrix.
"""

from __future__ import annotations

from typing import Any

import torch

_VIEWS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_NEG = torch.ops.aten.neg.default
# The arguments of an op as eager code would have them: Inductor gives the op tensors of the same strides.
EAGER_INPUTS = "eager_input_vals"


def _argument(node: Any, index: int, name: str) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name)


def _source(x: Any) -> Any:
    """The node whose values ``x`` has, to the bit."""
    while x.op == "call_function":
        if x.target in _VIEWS:
            x = x.args[0]
        elif x.target == _NEG and x.args[0].target == _NEG:
            x = x.args[0].args[0]
        else:
            break
    return x


def _is_mergeable(node: Any) -> bool:
    # The op of both casts finds the amaxes itself, and takes one matrix.
    return _argument(node, 3, "amax") is None and node.args[0].meta["val"].ndim == 2


def merge_casts(graph: Any) -> int:
    """Replace two ``quantize`` of a matrix, one of them transposed, by one ``quantize_both``; how many pairs it merged.

    Args:
        graph: a ``torch.fx.Graph`` without mutations but at its end, as Inductor has it after the partition; nodes
            have their fake tensors.
    """
    ops = torch.ops.tritonfp8
    waiting: dict[tuple[Any, bool], Any] = {}
    merged = 0
    for node in graph.find_nodes(op="call_function", target=ops.quantize.default):
        if not _is_mergeable(node):
            continue
        source, transposed = _source(node.args[0]), bool(_argument(node, 2, "transpose"))
        first = waiting.pop((source, not transposed), None)
        if first is None:
            waiting.setdefault((source, transposed), node)
            continue
        normal, of_transpose = (first, node) if transposed else (node, first)
        merged += _merge(graph, source, first, normal, of_transpose)
    return merged


def _merge(graph: Any, source: Any, first: Any, normal: Any, of_transpose: Any) -> bool:
    """Put one op in the place of ``first`` for both casts, unless its results would have other layouts."""
    both = torch.ops.tritonfp8.quantize_both.default
    specs = normal.args[1], of_transpose.args[1]
    fakes = both(source.meta["val"], *specs)
    before = *normal.meta["val"], *of_transpose.meta["val"]
    if [(x.shape, x.stride()) for x in fakes] != [(x.shape, x.stride()) for x in before]:
        return False
    with graph.inserting_before(first):
        new = graph.call_function(both, (source, *specs))
    new.meta = {**first.meta, "val": fakes}
    if EAGER_INPUTS in new.meta:
        (x, *_), _ = first.meta[EAGER_INPUTS]
        new.meta[EAGER_INPUTS] = (x, *specs), {}
    for cast, offset in ((normal, 0), (of_transpose, 2)):
        for user in list(cast.users):
            user.args = (new, user.args[1] + offset)
        _erase(graph, cast)
    return True


def _erase(graph: Any, node: Any) -> None:
    """Erase ``node``, and what only it used."""
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for x in inputs:
        if not x.users and x.op == "call_function":
            _erase(graph, x)
