"""Casts of several weights in one launch each: see :mod:`tritonfp8.kernels.cast.weights`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from tritonfp8.kernels.cast import weights as kernels
from tritonfp8.launch.casts import dense
from tritonfp8.launch.casts.partial_maxima import magnitude_dtype
from tritonfp8.launch.casts.side import META
from tritonfp8.launch.executor import planned
from tritonfp8.launch.plan import Planner, View, kernel_constants
from tritonfp8.specs import ROWWISE, empty_scale, spec_of, transposed
from tritonfp8.specs.formats import FORMATS, SCALE_FORMATS
from tritonfp8.tuning import VECTOR_BYTES, cast_tiles

T = TypeVar("T")
MOST_WEIGHTS = int(kernels.MOST.value)


def plan_quantize_weights(plan: Planner, *arguments: object) -> list[View] | None:
    """Outputs: qdata and scale of the transpose of each matrix.

    Args:
        plan: the planner.
        arguments: a view of each matrix, then the text of the spec.

    There is a plan for up to :data:`MOST_WEIGHTS` contiguous matrices of one dtype, of 2 or 4 bytes an element, by a
    spec with a float32 scale for each row of the transpose.
    """
    *given, text = arguments
    xs = [x for x in given if isinstance(x, View)]
    spec = spec_of(str(text))
    if spec.block != ROWWISE or SCALE_FORMATS[spec.scale_format].exponent_only or len(xs) > MOST_WEIGHTS:
        return None
    if xs[0].dtype == torch.float64 or len({x.dtype for x in xs}) > 1:
        return None
    if not all(x.numel() and x.is_contiguous() for x in xs):
        return None
    chunk = cast_tiles.rows_of_a_part(max(x.shape[0] for x in xs))
    parts = plan.empty((sum(-(-x.shape[0] // chunk) * x.shape[1] for x in xs),), magnitude_dtype(xs[0].dtype))
    sizes = _filled([x.shape for x in xs])
    flat_sizes = [size for shape in sizes for size in shape]
    tile = cast_tiles.AMAX_OF_COLUMNS.tile
    plan.launch(
        kernels.amax_of_weights_kernel,
        sum(-(-x.shape[0] // chunk) * -(-x.shape[1] // tile.n) for x in xs),
        (*_filled(xs), parts),
        flat_sizes,
        {
            "COUNT": len(xs), "EVEN": all(x.shape[0] % chunk == 0 and x.shape[1] % tile.n == 0 for x in xs),
            "CHUNK": chunk, **tile.sizes(),
        },
        **tile.options(),
    )  # fmt: skip
    results = []
    for x in xs:
        shape = x.shape[::-1]
        scale = plan.like(empty_scale(shape, spec.block, spec.scale_format, META))
        results.append((plan.empty(shape, FORMATS[spec.format].dtype), scale))
    vectors = all(size % VECTOR_BYTES == 0 for x in xs for size in x.shape)
    tile = cast_tiles.transposing(vectors)
    plan.launch(
        kernels.quantize_weights_kernel,
        sum(tile.programs(*x.shape) for x in xs),
        (*_filled(xs), *_filled([q for q, _ in results]), *_filled([scale for _, scale in results]), parts),
        flat_sizes,
        {
            **kernel_constants(spec, transposed(spec.block)),
            "PARTS": cast_tiles.step_parts(max(2, *(-(-x.shape[0] // chunk) for x in xs))),
            "COUNT": len(xs), "DIRECT_CAST": plan.device.has_direct_cast,
            "EVEN": all(tile.holds_whole(*x.shape) for x in xs), "CHUNK": chunk,
            **tile.stores(True), "GROUP": tile.group,
        },
        **tile.options(),
    )  # fmt: skip
    return [view for pair in results for view in pair]


def _filled(values: Sequence[T]) -> list[T]:
    """``values``, the last one again until there are :data:`MOST_WEIGHTS`: a kernel has as many parameters."""
    return [*values, *[values[-1]] * (MOST_WEIGHTS - len(values))]


def quantize_weights(x: Tensor, others: Sequence[Tensor], spec: str) -> list[Tensor]:
    """Launch the twin of :func:`tritonfp8.reference.quantize_weights`."""
    results = planned(plan_quantize_weights, (x, *others), (spec,))
    if results is None:
        return [tensor for each in (x, *others) for tensor in dense.quantize(each, spec, True)]
    return list(results)
