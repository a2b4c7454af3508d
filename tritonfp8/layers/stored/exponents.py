"""Scales that are powers of two as their exponents, one byte each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tritonfp8.formats import SCALE_FORMATS
from tritonfp8.specs import BLOCKS, QuantSpec, empty_scale, scale_shape

ONE, NAN = 127, 255
"""Exponents of the scales 1 and NaN."""


def exponents_of(scale: Tensor) -> Tensor:
    """The exponents of scales that are powers of two, as uint8; :data:`NAN` for NaN."""
    if scale.itemsize == 1:
        return scale.view(torch.uint8)
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def scales_of(exponents: Tensor) -> Tensor:
    """The float32 scales of exponents; the inverse of :func:`exponents_of`."""
    # 2^-127, the smallest of e8m0, is subnormal in float32.
    bits = torch.where(exponents == 0, 1 << 22, exponents.to(torch.int32) << 23)
    return torch.where(exponents == NAN, torch.nan, bits.view(torch.float32))


def scale_of(grid: Tensor, shape: Sequence[int], spec: QuantSpec) -> Tensor:
    """The scales of a tensor of this shape, from their exponents."""
    wanted = scale_shape(shape, spec.block)
    if tuple(grid.shape) != wanted:
        # A part without rows has no exponent, and a tensorwise spec one scale all the same.
        grid = grid.new_full(wanted, ONE)
    if SCALE_FORMATS[spec.scale_format].exponent_only:
        return grid.contiguous().view(SCALE_FORMATS[spec.scale_format].dtype)
    if BLOCKS[spec.block].rows_contiguous:
        return empty_scale(shape, spec.block, spec.scale_format, grid.device).copy_(scales_of(grid))
    return scales_of(grid).contiguous()
