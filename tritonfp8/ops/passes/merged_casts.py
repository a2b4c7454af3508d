"""One op for the two casts of a matrix that a graph casts untransposed in one place and transposed in another.

A layer in a compiled graph asks for the transposed cast of its input in backward, where it may be cheaper to compute
than to keep (:func:`tritonfp8.layers.linear.function.recomputable`). The partitioner decides. Where it puts that cast
into forward after all, forward has both casts, and each reads the whole matrix.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from tritonfp8.ops.passes.nodes import argument, erase_unused, layouts, replace, source


def _is_mergeable(node: Any) -> bool:
    # The op of both casts finds the amaxes itself, and takes one matrix.
    return argument(node, 3, "amax") is None and node.args[0].meta["val"].ndim == 2


def read_sources(graph: Any) -> int:
    """Let casts read what their copies were made of, as the partition is over; how many it changed."""
    changed = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.tritonfp8.quantize.default):
        x = node.args[0]
        if source(x) is not x:
            node.update_arg(0, source(x))
            erase_unused(graph, x)
            changed += 1
    return changed


def merge_casts(graph: Any) -> int:
    """Replace two casts of a matrix, one of them transposed, by one ``quantize_both``; how many pairs it merged.

    Args:
        graph: a ``torch.fx.Graph`` without mutations but at its end, as Inductor has it after the partition; nodes
            have their fake tensors.
    """
    waiting: dict[tuple[Any, bool], Any] = {}
    merged = _merge_known(graph)
    for node in graph.find_nodes(op="call_function", target=torch.ops.tritonfp8.quantize.default):
        if not _is_mergeable(node):
            continue
        x, transposed = source(node.args[0]), bool(argument(node, 2, "transpose"))
        first = waiting.pop((x, not transposed), None)
        if first is None:
            waiting.setdefault((x, transposed), node)
            continue
        merged += _merge(graph, x, first, *((first, node) if transposed else (node, first)))
    return merged


def _merge_known(graph: Any) -> int:
    """Merge ``quantize_with_amax`` with the transposed cast, the only reader of its amax; how many pairs."""
    merged = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.tritonfp8.quantize.default):
        amax = argument(node, 3, "amax")
        first = None if amax is None or amax.target is not operator.getitem else amax.args[0]
        if first is None or first.target != torch.ops.tritonfp8.quantize_with_amax.default:
            continue
        x = source(node.args[0])
        if not argument(node, 2, "transpose") or x is not source(first.args[0]) or [*amax.users] != [node]:
            continue
        given, node.args = node.args, node.args[:3]
        if _merge(graph, x, first, first, node):
            graph.erase_node(amax)
            merged += 1
        else:
            node.args = given
    return merged


def _merge(graph: Any, x: Any, first: Any, normal: Any, of_transpose: Any) -> bool:
    """Put one op in the place of ``first`` for both casts, unless its results would have other layouts."""
    both = torch.ops.tritonfp8.quantize_both.default
    specs = normal.args[1], of_transpose.args[1]
    fakes = both(x.meta["val"], *specs)
    if layouts(fakes) != layouts((*normal.meta["val"][:2], *of_transpose.meta["val"])):
        return False
    replace(graph, first, both, (x, *specs), fakes, (normal, of_transpose))
    return True
