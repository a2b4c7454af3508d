"""One op for the casts of several weights to transposes, which backward of a compiled block reads.

At small sizes a launch takes longer than its kernel, and each of these casts takes two or three.
"""

from __future__ import annotations

from typing import Any

import torch

from tritonfp8 import launch
from tritonfp8.ops.passes.nodes import argument, layouts, replace, source
from tritonfp8.specs import ROWWISE, SPECS

# The codes of all weights of a batch are in memory at once, so a batch has at most so many elements. The cast of a
# larger weight takes longer than its launches, so it gains nothing.
MOST_ELEMENTS = 2**25
MOST_ELEMENTS_OF_A_WEIGHT = 2**24


def may_batch(weight: torch.Tensor) -> bool:
    """Whether the cast of a weight to its transpose, without an amax, may be one of a batch."""
    return 0 < weight.numel() <= MOST_ELEMENTS_OF_A_WEIGHT


def _scale(node: Any) -> Any:
    """The scale by which a transpose is made from codes; None of a cast of values."""
    return source(node.args[1]) if node.target == torch.ops.tritonfp8.transpose_codes.default else None


def _specs(node: Any) -> tuple[str, ...]:
    """The spec of the result of a cast, and of the codes that it is made from."""
    return node.args[1:2] if _scale(node) is None else node.args[3:1:-1]


def _key(node: Any) -> tuple[Any, ...] | None:
    """What the casts of a batch have in common; None for a cast that belongs to no batch."""
    x, scale, specs = source(node.args[0]), _scale(node), _specs(node)
    if scale is None:
        joins = argument(node, 2, "transpose") and argument(node, 3, "amax") is None
    else:
        # Forward made the scale. One that the graph makes itself may come after the first cast of the batch.
        joins = scale.op == "placeholder" and argument(node, 4, "amax") is None
    if not joins or x.op != "placeholder" or any(SPECS[spec].block != ROWWISE for spec in specs):
        return None
    fake = x.meta["val"]
    if fake.itemsize == 1 or not all(isinstance(size, int) for size in (*fake.shape, *fake.stride())):
        return None
    if not fake.is_contiguous() or not may_batch(fake):
        return None
    return *specs, fake.dtype, fake.device


def batch_weights(graph: Any) -> int:
    """Replace the transposing casts of several inputs of the graph by ``quantize_weights``; how many batches it made.

    Args:
        graph: see :func:`~tritonfp8.ops.passes.merged_casts.merge_casts`.
    """
    # The ops are not there yet when this module is imported.
    targets = torch.ops.tritonfp8.quantize.default, torch.ops.tritonfp8.transpose_codes.default
    open_batches: dict[tuple[Any, ...], list[Any]] = {}
    batches = []
    for node in graph.nodes:
        key = _key(node) if node.target in targets else None
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
    scales = [scale for cast in casts if (scale := _scale(cast)) is not None]
    spec, *codes = _specs(casts[0])
    fakes = op(first.meta["val"], [x.meta["val"] for x in others], spec, [x.meta["val"] for x in scales], *codes)
    if layouts(fakes) != layouts([x for cast in casts for x in cast.meta["val"]]):
        return False
    replace(graph, casts[0], op, (first, others, spec, scales, *codes), fakes, casts)
    return True
