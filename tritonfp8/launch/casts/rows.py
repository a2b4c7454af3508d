"""The cast of matrices to scales of whole rows that also finds the amaxes of columns."""

from __future__ import annotations

import torch
import triton

from tritonfp8.kernels.cast.rows import quantize_rows_kernel
from tritonfp8.launch.partial_maxima import PartialMaxima
from tritonfp8.launch.plan import Planner, View, kernel_constants
from tritonfp8.specs import ROWWISE, QuantSpec
from tritonfp8.tuning import cast_tiles


def can_plan_rows(x: View) -> bool:
    """Whether :func:`plan_rows` takes the matrix ``x``: its rows are contiguous and fit in a tile."""
    return x.strides[1] == 1 and cast_tiles.rows_with_columns(x.shape[1], x.itemsize) is not None


def plan_rows(plan: Planner, x: View, matrices: int, spec: QuantSpec, qdata: View, scale: View) -> View:
    """Fill the result; the amaxes of the columns of each matrix, float32 ``[matrices, n]``.

    Args:
        plan: takes the launch.
        x: the matrices, one below the other, ``[matrices * rows, n]``; see :func:`can_plan_rows`.
        matrices: how many there are.
        spec: of the result, whose scales are of rows.
        qdata: the codes, of the shape of ``x``, rows contiguous.
        scale: ``[matrices * rows, 1]``.
    """
    n = x.shape[1]
    rows = x.shape[0] // matrices
    tile = cast_tiles.rows_with_columns(n, x.itemsize)
    assert tile is not None
    # As many programs as run at once, so that each finds the amaxes of as many rows as it can.
    programs = max(1, plan.device.num_sms * cast_tiles.ROWS_WARPS // tile.warps // matrices)
    tiles = triton.cdiv(triton.cdiv(rows, tile.m), programs)
    chunks = triton.cdiv(rows, tiles * tile.m)
    maxima = PartialMaxima.allocate(plan, x, 0, matrices * n, 0, chunks)
    plan.launch(
        quantize_rows_kernel,
        matrices * chunks,
        (x, qdata, scale, maxima.buffer),
        (rows, n, tiles, chunks, maxima.lines, x.strides[0], qdata.strides[0], scale.strides[0]),
        {
            **kernel_constants(spec, ROWWISE),
            "DIRECT_CAST": plan.device.has_direct_cast,
            "EVEN": rows % tile.m == 0 and n == tile.n,
            "TILE_M": tile.m,
            "TILE_N": tile.n,
            "STAGES": cast_tiles.ROWS_STAGES,
        },
        **tile.options(),
    )
    amax = plan.empty((1, matrices * n), torch.float32)
    maxima.reduce(plan, amax)
    return amax.strided((matrices, n), (n, 1))
