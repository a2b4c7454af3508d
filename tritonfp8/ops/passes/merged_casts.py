"""One op for the two casts of a matrix that a graph casts untransposed in one place and transposed in another.

A layer in a compiled graph asks for the transposed cast of its input in backward, where it may be cheaper to compute
than to keep (:func:`tritonfp8.layers.linear.function.recomputable`). The partitioner decides. Where it puts that cast
into forward after all, forward has both casts, and each reads the whole matrix.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from tritonfp8.ops.passes.nodes import EAGER_INPUTS, argument, erase_unused, layouts, replace, source
from tritonfp8.specs import SPECS
from tritonfp8.specs.formats import BYTE_FORMATS


def _is_mergeable(node: Any) -> bool:
    # The op of both casts finds the amaxes itself, takes one matrix, and makes codes of 8 bits.
    is_byte = SPECS[node.args[1]].format in BYTE_FORMATS
    return is_byte and argument(node, 3, "amax") is None and node.args[0].meta["val"].ndim == 2


def read_sources(graph: Any) -> int:
    """Let casts read what their copies were made of, as the partition is over; how many it changed."""
    changed = 0
    for op in (torch.ops.tritonfp8.quantize.default, torch.ops.tritonfp8.transpose_codes.default):
        for node in graph.find_nodes(op="call_function", target=op):
            x = node.args[0]
            if source(x) is not x:
                node.update_arg(0, source(x))
                erase_unused(graph, x)
                changed += 1
    return changed


def read_codes(graph: Any) -> int:
    """Let ``transpose_codes`` of values read the codes of these values, if the graph has them; how many it changed."""
    changed = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.tritonfp8.transpose_codes.default):
        x, cast = node.args[0], _cast_of(node)
        codes = None if cast is None else next((user for user in cast.users if user.args[1] == 0), None)
        if codes is None:
            continue
        node.update_arg(0, codes)
        if EAGER_INPUTS in node.meta:
            arguments, named = node.meta[EAGER_INPUTS]
            node.meta[EAGER_INPUTS] = (codes.meta["val"], *arguments[1:]), named
        erase_unused(graph, x)
        changed += 1
    return changed


def _casts() -> tuple[Any, ...]:
    """The ops whose first result has the codes, and whose second has their scales."""
    names = ("quantize", "quantize_with_amax", "quantize_matrices", "quantize_matrices_with_amax")
    return tuple(getattr(torch.ops.tritonfp8, name).default for name in names)


def merge_casts(graph: Any) -> int:
    """Replace two casts of a matrix, one of them transposed, by one ``quantize_both``; how many pairs it merged.

    Args:
        graph: a ``torch.fx.Graph`` without mutations but at its end, as Inductor has it after the partition; nodes
            have their fake tensors.
    """
    waiting: dict[tuple[Any, bool], Any] = {}
    merged = _merge_known(graph) + _merge_codes(graph)
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


def _merge_codes(graph: Any) -> int:
    """Merge ``quantize`` with the transpose that is made from its codes; how many pairs."""
    merged = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.tritonfp8.transpose_codes.default):
        first, x = _cast_of(node), source(node.args[0])
        if first is None or first.target != torch.ops.tritonfp8.quantize.default or argument(node, 4, "amax"):
            continue
        if _is_mergeable(first) and not argument(first, 2, "transpose"):
            merged += _merge(graph, x, first, first, node, (node.args[3], True))
    return merged


def _cast_of(node: Any) -> Any:
    """The cast that made the codes of a ``transpose_codes`` of values, if the graph has it; else None."""
    x, scale = node.args[:2]
    cast = scale.args[0] if scale.target is operator.getitem else None
    return cast if cast is not None and cast.target in _casts() and source(cast.args[0]) is source(x) else None


def _merge(graph: Any, x: Any, first: Any, normal: Any, of_transpose: Any, more: tuple[Any, ...] = ()) -> bool:
    """Put one op in the place of ``first`` for both casts, unless its results would have other layouts.

    ``more``: the last arguments of the op; by default the spec of the transposed cast.
    """
    both = torch.ops.tritonfp8.quantize_both.default
    arguments = normal.args[1], *(more or (of_transpose.args[1],))
    fakes = both(x.meta["val"], *arguments)
    if layouts(fakes) != layouts((*normal.meta["val"][:2], *of_transpose.meta["val"])):
        return False
    replace(graph, first, both, (x, *arguments), fakes, (normal, of_transpose))
    return True
