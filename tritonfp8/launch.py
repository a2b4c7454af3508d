"""Validate, allocate, choose a configuration, launch: the Triton twin of each function in :mod:`tritonfp8.reference`.

On CPU tensors the kernels run in Triton's interpreter (``TRITON_INTERPRET=1``), which is how they are tested without a
GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tritonfp8 import hardware, reference
from tritonfp8.compiled import run
from tritonfp8.formats import FORMATS, SCALE_FORMATS
from tritonfp8.kernels import quantize as quantize_kernels
from tritonfp8.launch_matmul import product_kind
from tritonfp8.launch_matmul import scaled_matmul as _scaled_matmul
from tritonfp8.replay import replayed
from tritonfp8.specs import (
    BLOCK_128X128,
    empty_scale,
    scale_shape,
    transposed,
)

MAX_ROW_IN_TILE = 16384
TILE_ELEMENTS = 8192

__all__ = ["amax", "dequantize", "product_kind", "quantize", "quantize_both", "scaled_matmul"]

Block = Sequence[int]


def _rows(x: Tensor) -> Tensor:
    """``[..., K]`` as ``[rows, K]``."""
    if x.ndim == 2:
        return x
    return x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.reshape(math.prod(x.shape[:-1]), 0)


def _is_folded(x: Tensor, block: Block) -> bool:
    """Whether the blocks of ``x`` are those of ``x`` folded to 2-D: no block of several rows crosses a matrix."""
    return x.ndim <= 2 or block[0] <= 1 or x.shape[-2] % block[0] == 0


class _Tile(NamedTuple):
    m: int
    n: int
    warps: int


def _tile(m: int, n: int, block: Block | None, block_t: Block | None) -> _Tile:
    """Tile of a cast of ``x [m, n]``; both blocks in the coordinates of ``x``."""
    if block_t is None and block == (1, -1) and n <= MAX_ROW_IN_TILE:
        width = max(triton.next_power_of_2(n), 128)
        return _Tile(max(1, TILE_ELEMENTS // 2 // width), width, 4 if width <= 4096 else 8)
    if block_t is None and block is not None and block[0] <= 1:
        return _Tile(32, 128, 4)
    # A square block is one reduction over the tile; strips of it are reductions of their own, faster in fewer warps.
    square = block_t is None or block_t == BLOCK_128X128
    return _Tile(128, 128, 8 if square else 4)


def _fits(block: Block, tile: _Tile, m: int, n: int) -> bool:
    return (block[0] != -1 or m <= tile.m) and (block[1] != -1 or n <= tile.n)


def _programs(tile: _Tile, m: int, n: int) -> int:
    return -(-m // tile.m) * -(-n // tile.n)


def _amax_bits(x: Tensor, block: Block | None, block_t: Block | None) -> tuple[Tensor | None, Tensor | None]:
    """amax bits of ``x [m, n]`` for one or two blocks (in the coordinates of ``x``), in one pass."""
    m, n = x.shape
    outs = [None if b is None else x.new_zeros(scale_shape((m, n), b), dtype=torch.int32) for b in (block, block_t)]
    tile = _Tile(128, 128, 8)
    sides = [x if out is None else out for out in outs]
    rows, cols = block or (1, 1)
    rows_t, cols_t = block_t or (1, 1)
    run(
        quantize_kernels.amax_kernel,
        _programs(tile, m, n),
        (x, *sides),
        (m, n, *x.stride(), *(size for side in sides for size in (*side.shape, *side.stride()))),
        {
            "ROWS": rows, "COLS": cols, "ROWS_T": rows_t, "COLS_T": cols_t,
            "NORMAL": block is not None, "TRANSPOSED": block_t is not None, "TILE_M": tile.m, "TILE_N": tile.n,
        },
        num_warps=tile.warps,
    )  # fmt: skip
    return outs[0], outs[1]


@replayed
def amax(x: Tensor, block: Block) -> Tensor:
    """Launch the twin of :func:`tritonfp8.reference.amax`."""
    if not x.numel():
        return reference.amax(x, block)
    if not _is_folded(x, block):
        return torch.stack([amax(matrix, block) for matrix in x])
    bits, _ = _amax_bits(_rows(x), tuple(block), None)
    assert bits is not None
    found = bits.view(torch.float32).reshape(scale_shape(x.shape, block))
    # One NaN, as in the reference: the kernel keeps the bits of the NaN that it met.
    return torch.where(found.isnan(), torch.nan, found)


class _Side(NamedTuple):
    """One result of a cast: tensors and strides in the coordinates of ``x``."""

    qdata: Tensor
    scale: Tensor
    amax_bits: Tensor | None
    block: tuple[int, int]
    format: str
    scale_format: str
    scale_rounding: str

    def runtime_args(self) -> list[int]:
        amax = self.scale if self.amax_bits is None else self.amax_bits
        return [*self.scale.shape, *self.qdata.stride(), *self.scale.stride(), *amax.stride()]

    def tensors(self) -> list[Tensor]:
        scale = self.scale.view(torch.uint8) if SCALE_FORMATS[self.scale_format].exponent_only else self.scale
        return [self.qdata, scale, scale if self.amax_bits is None else self.amax_bits]

    def numerics(self) -> tuple[object, ...]:
        """What decides the compile-time arguments of this side."""
        return self.block, self.format, self.scale_format, self.scale_rounding, self.amax_bits is not None


@functools.cache
def _side_constants(
    suffix: str, block: tuple[int, int], format: str, scale_format: str, scale_rounding: str, given_amax: bool
) -> dict[str, object]:
    fmt = FORMATS[format]
    values = {
        "ROWS": block[0],
        "COLS": block[1],
        "QMAX": fmt.qmax,
        "EMAX": fmt.emax,
        "QMAX_MANTISSA": fmt.qmax_mantissa,
        "MANTISSA_BITS": fmt.mantissa_bits,
        "EMIN": fmt.emin,
        "E8M0": SCALE_FORMATS[scale_format].exponent_only,
        "POW2": scale_rounding == "pow2",
        "GIVEN_AMAX": given_amax,
    }
    return {f"{name}{suffix}": value for name, value in values.items()}


def _quantize(x: Tensor, side: _Side | None, side_t: _Side | None) -> None:
    """Fill one or two sides from ``x [m, n]``; computes the amax that a tile cannot see whole."""
    m, n = x.shape
    given = side or side_t
    assert given is not None
    tile = _tile(m, n, side and side.block, side_t and side_t.block)
    missing, missing_t = (
        s.block if s is not None and s.amax_bits is None and not _fits(s.block, tile, m, n) else None
        for s in (side, side_t)
    )
    if missing or missing_t:
        bits, bits_t = _amax_bits(x, missing, None if missing == missing_t else missing_t)
        if side is not None and missing:
            side = side._replace(amax_bits=bits)
        if side_t is not None and missing_t:
            side_t = side_t._replace(amax_bits=bits if missing == missing_t else bits_t)
    first, second = side or given, side_t or given
    constants = {
        **_side_constants("", *first.numerics()),
        **_side_constants("_T", *second.numerics()),
        "NORMAL": side is not None,
        "TRANSPOSED": side_t is not None,
        "DIRECT_CAST": hardware.abilities(x.device).has_direct_cast,
        "TILE_M": tile.m,
        "TILE_N": tile.n,
    }
    run(
        quantize_kernels.quantize_kernel,
        _programs(tile, m, n),
        (x, *first.tensors(), *second.tensors()),
        (m, n, *x.stride(), *first.runtime_args(), *second.runtime_args()),
        constants,
        num_warps=tile.warps,
    )


def _side(
    x: Tensor, format: str, block: Block, scale_format: str, scale_rounding: str, transpose: bool, amax: Tensor | None
) -> tuple[_Side, Tensor, Tensor]:
    """Allocate one result of casting ``x``: the side, and its tensors as the caller gets them."""
    shape = x.shape[::-1] if transpose else x.shape
    qdata = torch.empty(shape, dtype=FORMATS[format].dtype, device=x.device)
    scale = empty_scale(shape, block, scale_format, x.device)
    matrix, scales = qdata, scale
    if qdata.ndim != 2:
        matrix = _rows(qdata)
        scales = scale.view(scale_shape(matrix.shape, block))
    bits = None if amax is None else amax.reshape(scales.shape).view(torch.int32)
    if transpose:
        matrix, scales, bits = matrix.t(), scales.t(), None if bits is None else bits.t()
    of_x = transposed(block) if transpose else (block[0], block[1])
    return _Side(matrix, scales, bits, of_x, format, scale_format, scale_rounding), qdata, scale


@replayed
def quantize(
    x: Tensor,
    format: str,
    block: Block,
    scale_format: str,
    scale_rounding: str,
    transpose: bool = False,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the twin of :func:`tritonfp8.reference.quantize`."""
    if not x.numel():
        return reference.quantize(x, format, block, scale_format, scale_rounding, transpose, amax)
    if not _is_folded(x, block):
        amaxes = [None] * len(x) if amax is None else amax
        pairs = [
            quantize(m, format, block, scale_format, scale_rounding, False, a) for m, a in zip(x, amaxes, strict=True)
        ]
        return torch.stack([q for q, _ in pairs]), torch.stack([s for _, s in pairs])
    side, qdata, scale = _side(x, format, block, scale_format, scale_rounding, transpose, amax)
    _quantize(_rows(x), None if transpose else side, side if transpose else None)
    return qdata, scale


@replayed
def quantize_both(
    x: Tensor,
    format: str,
    block: Block,
    scale_format: str,
    scale_rounding: str,
    format_t: str,
    block_t: Block,
    scale_format_t: str,
    scale_rounding_t: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the twin of :func:`tritonfp8.reference.quantize_both`."""
    if not x.numel():
        spec, spec_t = (
            (format, block, scale_format, scale_rounding),
            (format_t, block_t, scale_format_t, scale_rounding_t),
        )
        return reference.quantize_both(x, *spec, *spec_t)
    side, qdata, scale = _side(x, format, block, scale_format, scale_rounding, False, None)
    side_t, qdata_t, scale_t = _side(x, format_t, block_t, scale_format_t, scale_rounding_t, True, None)
    _quantize(x, side, side_t)
    return qdata, scale, qdata_t, scale_t


@replayed
def dequantize(
    qdata: Tensor, scale: Tensor, format: str, block: Block, scale_format: str, scale_rounding: str, dtype: torch.dtype
) -> Tensor:
    """Launch the twin of :func:`tritonfp8.reference.dequantize`."""
    if not qdata.numel():
        return qdata.new_empty(qdata.shape, dtype=dtype)
    if not _is_folded(qdata, block):
        parts = zip(qdata, scale, strict=True)
        return torch.stack([dequantize(q, s, format, block, scale_format, scale_rounding, dtype) for q, s in parts])
    q = _rows(qdata)
    exponent_only = SCALE_FORMATS[scale_format].exponent_only
    s = (scale.view(torch.uint8) if exponent_only else scale).reshape(scale_shape(q.shape, block))
    m, n = q.shape
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    tile = _Tile(64, 128, 4)
    rows, cols = block
    run(
        quantize_kernels.dequantize_kernel,
        _programs(tile, m, n),
        (q, s, out),
        (m, n, *q.stride(), *s.stride()),
        {"ROWS": rows, "COLS": cols, "E8M0": exponent_only, "TILE_M": tile.m, "TILE_N": tile.n},
        num_warps=tile.warps,
    )
    return out.view(qdata.shape)


scaled_matmul = replayed(_scaled_matmul)
