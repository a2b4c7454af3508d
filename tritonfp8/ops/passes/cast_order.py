"""The order of casts that lets Inductor compute their inputs in the memory of what they are made of.

Inductor computes tensors that are made of the same ones by one kernel. It writes a result over an operand if no other
result of this kernel reads that operand; results that it depends on do not count. In backward of a gated MLP (SwiGLU,
GEGLU) the gradients of both branches are made of the gradient of their product and of the gate, and only the gradient
of the gate reads the other branch, too. Autograd casts the gradient of the other branch first. So this gradient is
written over nothing, and takes new memory where the most is in use. Here the gradient of the gate comes first and is
written over the other branch. The second one is made to depend on it, and is written over the gradient of the product.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tritonfp8.compat.torch_private import statically_known_true
from tritonfp8.ops.passes.nodes import source

_CASTS = (
    "quantize", "quantize_both", "quantize_both_sum", "quantize_with_amax", "quantize_groups", "quantize_groups_both",
)  # fmt: skip
_GEMMS = ("scaled_matmul", "scaled_grouped_matmul")
_ATEN = torch.ops.aten
_VIEWS = (_ATEN.view.default, _ATEN.reshape.default, _ATEN._unsafe_view.default)
_CONVERSION = torch.ops.prims.convert_element_type.default


def order_casts(graph: Any) -> int:
    """Let a cast precede another if its input can be written over an operand, and then the other's; how many pairs.

    Args:
        graph: see :func:`~tritonfp8.ops.passes.merged_casts.merge_casts`.
    """
    casts = [node for node in graph.nodes if node.target in _ops(_CASTS)]
    made_of = {cast: _operands(source(cast.args[0])) for cast in casts}
    changed = 0
    for index, second in enumerate(casts):
        for first in casts[:index]:
            more = made_of[second] - made_of[first]
            if not (made_of[first] and made_of[first] < made_of[second] and _has_shape_of(first, second)):
                continue
            if any(_is_free_after(x, second) for x in more):
                changed += _swap(graph, first, second)
                break
    return changed


# The ops are not there yet when this module is imported.
@functools.cache
def _ops(names: tuple[str, ...]) -> tuple[Any, ...]:
    return tuple(getattr(torch.ops.tritonfp8, name).default for name in names)


def _has_shape_of(cast: Any, other: Any) -> bool:
    sizes, others = (x.args[0].meta["val"].shape for x in (cast, other))
    return len(sizes) == len(others) and all(statically_known_true(a == b) for a, b in zip(sizes, others, strict=True))


def _is_pointwise(node: Any) -> bool:
    if node.op != "call_function":
        return False
    return node.target in (*_VIEWS, _CONVERSION) or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _operands(x: Any) -> set[Any]:
    """The tensors of as many elements as ``x`` that one pointwise kernel makes it of; empty if another op makes it."""
    found, waiting = set(), [x] if _is_pointwise(x) else []
    size = x.meta["val"].numel()
    while waiting:
        for node in waiting.pop().all_input_nodes:
            fake = node.meta.get("val")
            if _is_pointwise(node):
                waiting.append(node)
            # Other inputs are sizes, where they change.
            elif isinstance(fake, torch.Tensor) and statically_known_true(fake.numel() == size):
                found.add(node)
    return found


def _is_free_after(x: Any, cast: Any) -> bool:
    """Whether only the input of ``cast`` is made of ``x``, and has as many bytes."""
    made = source(cast.args[0])
    waiting = [*x.users]
    while waiting:
        node = waiting.pop()
        if node is made:
            continue
        if not _is_pointwise(node):
            return False
        waiting += node.users
    # `nbytes` is an error where sizes change.
    sizes = [fake.numel() * fake.itemsize for fake in (x.meta["val"], made.meta["val"])]
    return statically_known_true(sizes[0] == sizes[1])


def _swap(graph: Any, first: Any, second: Any) -> bool:
    """Put the second cast with the GEMM of its codes before the first, unless they depend on it."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    x, of_second = source(first.args[0]), source(second.args[0])
    before = min(x.users, key=place.__getitem__)
    users = sorted((user for result in second.users for user in result.users), key=place.__getitem__)
    gemms = [user for user in users if user.target in _ops(_GEMMS)]
    # With its GEMM its codes are free before the other cast writes as many.
    for last in (*gemms[:1], second):
        needed = _needed(last, place[before], place)
        if before not in needed:
            for node in sorted(needed, key=place.__getitem__):
                before.prepend(node)
            _make_depend(graph, x, of_second, before)
            return True
    return False


def _needed(node: Any, after: int, place: dict[Any, int]) -> set[Any]:
    """``node`` and what it depends on, as far as it is not before a place."""
    found, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node not in found and place[node] >= after:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _make_depend(graph: Any, x: Any, other: Any, before: Any) -> None:
    """Let what reads ``x`` read the same values of a node that depends on ``other``, at no cost in the kernel.

    It stands behind the cast of ``other``: only then Inductor reads the result in place of what it is made of.
    """
    users = list(x.users)
    with graph.inserting_before(before):
        condition = graph.call_function(_ATEN.ne.Scalar, (other, 0))
        same = graph.call_function(_ATEN.where.self, (condition, x, x))
    condition.meta = {"val": _ATEN.ne.Scalar(other.meta["val"], 0)}
    same.meta = {**x.meta}
    for user in users:
        user.replace_input_with(x, same)
