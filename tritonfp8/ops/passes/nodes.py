"""What the rewrites ask of a node of a graph."""

from __future__ import annotations

from typing import Any

import torch

_VIEWS = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_NEG = torch.ops.aten.neg.default
# The arguments of an op as eager code would have them: Inductor gives the op tensors of the same strides.
EAGER_INPUTS = "eager_input_vals"


def argument(node: Any, index: int, name: str) -> Any:
    """An argument of a call, by position or by name; None if it was left out."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name)


def source(x: Any) -> Any:
    """The node whose values ``x`` has, to the bit."""
    while x.op == "call_function":
        if x.target in _VIEWS:
            x = x.args[0]
        elif x.target == _NEG and x.args[0].target == _NEG:
            x = x.args[0].args[0]
        else:
            break
    return x


def layouts(tensors: Any) -> list[tuple[Any, Any]]:
    """Sizes and strides of tensors."""
    return [(x.shape, x.stride()) for x in tensors]


def replace(graph: Any, before: Any, target: Any, arguments: tuple[Any, ...], fakes: Any, casts: Any) -> None:
    """Let a call of ``target`` return what ``casts`` do, one behind the other.

    Args:
        graph: the graph.
        before: the call stands before this node.
        target: the op.
        arguments: of the call.
        fakes: what it returns, without values.
        casts: nodes of calls that return two tensors each; they are erased.
    """
    with graph.inserting_before(before):
        new = graph.call_function(target, arguments)
    new.meta = {key: value for key, value in before.meta.items() if key != EAGER_INPUTS} | {"val": fakes}
    if all(EAGER_INPUTS in cast.meta for cast in casts):
        new.meta[EAGER_INPUTS] = torch.fx.node.map_arg(arguments, lambda node: node.meta["val"]), {}
    for index, cast in enumerate(casts):
        for user in list(cast.users):
            user.args = (new, user.args[1] + 2 * index)
        erase_unused(graph, cast)


def erase_unused(graph: Any, node: Any) -> None:
    """Erase a call that nobody uses, and what only it used."""
    if node.users or node.op != "call_function":
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for x in inputs:
        erase_unused(graph, x)
