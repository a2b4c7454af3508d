"""Transposes of several matrices by two launches for all: see :mod:`tritonfp8.kernels.cast.weights`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from tritonfp8.kernels.cast import weights as kernels
from tritonfp8.launch.casts.partial_maxima import magnitude_dtype
from tritonfp8.launch.casts.side import META
from tritonfp8.launch.plan import Planner, View, kernel_constants
from tritonfp8.specs import ROWWISE, QuantSpec, check_transposable, empty_scale, transposed
from tritonfp8.specs.formats import FORMATS, SCALE_FORMATS
from tritonfp8.tuning import VECTOR_BYTES, cast_tiles

T = TypeVar("T")
MOST_WEIGHTS = int(kernels.MOST.value)


def plan_transposes(
    plan: Planner, xs: Sequence[View], spec: QuantSpec, scales: Sequence[View] = (), codes: QuantSpec | None = None
) -> list[View] | None:
    """Outputs: qdata and scale of the transpose of each matrix.

    Args:
        plan: the planner.
        xs: up to :data:`MOST_WEIGHTS` contiguous matrices of one dtype, of 2 or 4 bytes an element.
        spec: of the results, with a float32 scale for each row of the transpose.
        scales: of the codes that the matrices have, float32, one a row; empty to cast their values.
        codes: the spec of these codes.
    """
    if codes is not None:
        check_transposable(codes, spec)
    if not _is_served(xs, spec) or (codes is not None and not _is_served(scales, codes)):
        return None
    sizes = _filled([x.shape for x in xs])
    flat_sizes = [size for shape in sizes for size in shape]
    factors = _filled(xs if codes is None else scales)
    results = [_result(plan, x.shape[::-1], spec) for x in xs]
    constants = kernel_constants(spec, transposed(spec.block))
    cast = {"COUNT": len(xs), "CODES": codes is not None, "DIRECT_CAST": plan.device.has_direct_cast}
    chunk = cast_tiles.rows_of_a_part(max(x.shape[0] for x in xs))
    # Values of codes are float32.
    magnitudes = magnitude_dtype(xs[0].dtype if codes is None else torch.float32)
    parts = plan.empty((sum(-(-x.shape[0] // chunk) * x.shape[1] for x in xs),), magnitudes)
    tile = cast_tiles.AMAX_OF_COLUMNS.tile
    plan.launch(
        kernels.amax_of_weights_kernel,
        sum(-(-x.shape[0] // chunk) * -(-x.shape[1] // tile.n) for x in xs),
        (*_filled(xs), *factors, results[0][0], parts),
        flat_sizes,
        {
            **{name: constants[name] for name in ("QMAX", "MANTISSA_BITS", "EMIN")},
            **cast, "EVEN": all(x.shape[0] % chunk == 0 and x.shape[1] % tile.n == 0 for x in xs),
            "CHUNK": chunk, **tile.sizes(),
            "R": 1 if codes is None else tile.rows_a_thread(VECTOR_BYTES // xs[0].itemsize),
        },
        **tile.options(),
    )  # fmt: skip
    vectors = all(size % VECTOR_BYTES == 0 for x in xs for size in x.shape)
    tile = cast_tiles.transposing(vectors)
    plan.launch(
        kernels.quantize_weights_kernel,
        sum(tile.programs(*x.shape) for x in xs),
        (*_filled(xs), *factors, *_filled([q for q, _ in results]), *_filled([s for _, s in results]), parts),
        flat_sizes,
        {
            **constants,
            "PARTS": cast_tiles.step_parts(max(2, *(-(-x.shape[0] // chunk) for x in xs))),
            **cast, "EVEN": all(tile.holds_whole(*x.shape) for x in xs), "CHUNK": chunk,
            **tile.stores(True), "GROUP": tile.group,
        },
        **tile.options(),
    )  # fmt: skip
    return [view for pair in results for view in pair]


def _result(plan: Planner, shape: tuple[int, ...], spec: QuantSpec) -> tuple[View, View]:
    scale = plan.like(empty_scale(shape, spec.block, spec.scale_format, META))
    return plan.empty(shape, FORMATS[spec.format].dtype), scale


def _is_served(tensors: Sequence[View], spec: QuantSpec) -> bool:
    """Whether the kernels read matrices that are cast by ``spec``, or the scales of matrices that were."""
    first = tensors[0].dtype
    if spec.block != ROWWISE or SCALE_FORMATS[spec.scale_format].exponent_only or len(tensors) > MOST_WEIGHTS:
        return False
    if first == torch.float64 or first.itemsize == 1 or len({x.dtype for x in tensors}) > 1:
        return False
    return all(x.numel() and x.is_contiguous() for x in tensors)


def _filled(values: Sequence[T]) -> list[T]:
    """``values``, the last one again until there are :data:`MOST_WEIGHTS`: a kernel has as many parameters."""
    return [*values, *[values[-1]] * (MOST_WEIGHTS - len(values))]
