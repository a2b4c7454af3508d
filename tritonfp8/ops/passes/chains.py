"""One op for ops of ours that follow one another: the host looks up one plan for all, and allocates less.

A chain has no other computation between its ops, so they would run one after another anyway.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from tritonfp8 import launch
from tritonfp8.ops.passes.nodes import EAGER_INPUTS, layouts
from tritonfp8.reference import Chain, ChainStep, TensorPlace

MOST_WORK = 2**36
"""M N K of the largest GEMM that is a step of a chain. A larger one takes longer than the host does, so a chain gains
nothing, and what its last steps write has memory from its beginning."""
_ATEN = torch.ops.aten
_VIEWS = (
    *(_ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default, _ATEN.detach.default),
    *(_ATEN.permute.default, _ATEN.t.default, _ATEN.transpose.int),
)


def join_chains(graph: Any) -> int:
    """Replace ops of ours that follow one another by ``chain``; how many chains it made.

    Args:
        graph: see :func:`~tritonfp8.ops.passes.merged_casts.merge_casts`.
    """
    runs: list[list[Any]] = [[]]
    for node in graph.nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if _is_step(node):
            runs[-1].append(node)
        elif node.target not in _VIEWS or any(_step_of(x) in runs[-1] for x in node.all_input_nodes):
            runs.append([])
    return sum(_join(graph, run) for run in runs if len(run) > 1)


def _step_of(x: Any) -> Any:
    """The node of the op that made a tensor."""
    return x.args[0] if x.target is operator.getitem else x


def _is_step(node: Any) -> bool:
    if getattr(node.target, "namespace", None) != "tritonfp8" or node.kwargs:
        return False
    op = node.target._opname
    if not launch.may_chain(op, node.args):
        return False
    fakes = [x.meta["val"] for x in node.all_input_nodes]
    if not all(isinstance(size, int) for x in fakes for size in (*x.shape, *x.stride())):
        return False
    columns = node.args[3].meta["val"].shape[0] if op == "scaled_matmul" else 1
    return fakes[0].ndim == 2 and columns * fakes[0].numel() <= MOST_WORK


def _join(graph: Any, run: list[Any]) -> bool:
    """Put one op in the place of the last node of ``run`` for all, unless its results would have other layouts."""
    inputs = [*dict.fromkeys(x for node in run for x in node.all_input_nodes if _step_of(x) not in run)]
    places = {x: TensorPlace(i) for i, x in enumerate(inputs)}
    count = len(inputs)
    kept: dict[TensorPlace, list[Any]] = {}
    for node in run:
        is_one = isinstance(node.meta["val"], torch.Tensor)
        for x, index in [(node, 0)] if is_one else [(user, user.args[1]) for user in node.users]:
            places[x] = TensorPlace(count + index)
            if any(user not in run for user in x.users):
                kept.setdefault(places[x], []).append(x)
        count += 1 if is_one else len(node.meta["val"])
    steps = tuple(ChainStep(node.target._opname, torch.fx.node.map_arg(node.args, places.__getitem__)) for node in run)
    arguments = inputs[0], inputs[1:], Chain(steps, tuple(map(int, kept))).text
    op, given = torch.ops.tritonfp8.chain.default, torch.fx.node.map_arg(arguments, lambda node: node.meta["val"])
    fakes = op(*given)
    if layouts(fakes) != layouts([x.meta["val"] for x, *_ in kept.values()]):
        return False
    with graph.inserting_after(run[-1]):
        last = new = graph.call_function(op, arguments)
    new.meta = {key: value for key, value in run[-1].meta.items() if key != EAGER_INPUTS} | {"val": fakes}
    if all(EAGER_INPUTS in node.meta for node in run):
        new.meta[EAGER_INPUTS] = given, {}
    for index, same in enumerate(kept.values()):
        with graph.inserting_after(last):
            last = graph.call_function(operator.getitem, (new, index))
        last.meta = {**same[0].meta}
        for x in same:
            x.replace_all_uses_with(last)
    for node in reversed(run):
        for x in [*node.users, node]:
            graph.erase_node(x)
    return True
