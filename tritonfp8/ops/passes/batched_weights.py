"""One op for the casts of several weights to transposes, which backward of a compiled block reads.

At small sizes a launch takes longer than its kernel, and each of these casts takes three.
"""

from __future__ import annotations

from typing import Any

import torch

from tritonfp8 import launch
from tritonfp8.ops.passes.nodes import argument, layouts, replace, source
from tritonfp8.specs import ROWWISE, spec_of

# The codes of all weights of a batch are in memory at once, so a batch has at most so many elements. The cast of a
# larger weight takes longer than its launches, so it gains nothing.
MOST_ELEMENTS = 2**25
MOST_ELEMENTS_OF_A_WEIGHT = 2**24


def may_batch(weight: torch.Tensor) -> bool:
    """Whether the cast of a weight to its transpose, without an amax, may be one of a batch."""
    return 0 < weight.numel() <= MOST_ELEMENTS_OF_A_WEIGHT


def _key(node: Any) -> tuple[Any, ...] | None:
    """What the casts of a batch have in common; None for a cast that belongs to no batch."""
    x, spec = source(node.args[0]), node.args[1]
    if x.op != "placeholder" or not argument(node, 2, "transpose") or argument(node, 3, "amax") is not None:
        return None
    fake = x.meta["val"]
    if spec_of(spec).block != ROWWISE or not all(isinstance(size, int) for size in (*fake.shape, *fake.stride())):
        return None
    if not fake.is_contiguous() or not may_batch(fake):
        return None
    return spec, fake.dtype, fake.device


def batch_weights(graph: Any) -> int:
    """Replace ``quantize`` of several inputs of the graph by ``quantize_weights``; how many batches it made.

    Args:
        graph: see :func:`~tritonfp8.ops.passes.merged_casts.merge_casts`.
    """
    open_batches: dict[tuple[Any, ...], list[Any]] = {}
    batches = []
    for node in graph.find_nodes(op="call_function", target=torch.ops.tritonfp8.quantize.default):
        key = _key(node)
        if key is None:
            continue
        batch = open_batches.get(key)
        size = sum(each.args[0].meta["val"].numel() for each in (*(batch or ()), node))
        if batch is None or len(batch) == launch.MOST_WEIGHTS or size > MOST_ELEMENTS:
            batch = open_batches[key] = []
            batches.append(batch)
        batch.append(node)
    return sum(_batch(graph, batch) for batch in batches if len(batch) > 1)


def _batch(graph: Any, casts: list[Any]) -> bool:
    """Put one op in the place of the first cast for all of them, unless its results would have other layouts."""
    op = torch.ops.tritonfp8.quantize_weights.default
    first, *others = (source(cast.args[0]) for cast in casts)
    spec = casts[0].args[1]
    fakes = op(first.meta["val"], [x.meta["val"] for x in others], spec)
    if layouts(fakes) != layouts([x for cast in casts for x in cast.meta["val"]]):
        return False
    replace(graph, casts[0], op, (first, others, spec), fakes, casts)
    return True
