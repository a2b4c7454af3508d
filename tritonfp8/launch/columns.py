"""The cast of matrices to scales of whole columns, which reads each element once."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tritonfp8.kernels.cast import columns as kernels
from tritonfp8.launch.plan import Planner, View, kernel_constants
from tritonfp8.specs import COLUMNWISE, QuantSpec
from tritonfp8.tuning import VECTOR_BYTES, cast_tiles

TILE = cast_tiles.COLUMNS


class Columns(NamedTuple):
    """A cast, in the coordinates of ``x``.

    Attributes:
        x: the matrices, contiguous, one below the other, ``[matrices * rows, n]``.
        matrices: how many there are.
        qdata, q_strides: the codes; strides of rows, columns and matrices.
        scale, scale_strides, scale_sizes: the scales, likewise, and how many rows and columns of them a matrix has.
        spec: of the result.
        transposes: whether the codes are stored transposed.
    """

    x: View
    matrices: int
    qdata: View
    q_strides: tuple[int, ...]
    scale: View
    scale_strides: tuple[int, ...]
    scale_sizes: tuple[int, ...]
    spec: QuantSpec
    transposes: bool


def run_together(rows: int, num_sms: int) -> bool:
    """Whether the tiles of a strip of columns run at the same time on a GPU that does nothing else."""
    return -(-rows // TILE.m) <= cast_tiles.COLUMNS_PER_SM * num_sms


def plan_columns(plan: Planner, of: Columns) -> None:
    """Fill the result from matrices that :func:`run_together` serves; from others slowly."""
    rows, n = of.x.shape[0] // of.matrices, of.x.shape[1]
    tiles, strips = -(-rows // TILE.m), of.matrices * -(-n // TILE.n)
    columns = of.matrices * n
    zeros = plan.empty((columns + 2 + strips,), torch.int32, zeroed=True)
    amax, progress = zeros.strided((columns,), (1,)), zeros.strided((2 + strips,), (1,), columns)
    left = plan.empty((strips * tiles,), torch.int32)
    # The interpreter runs one program after another.
    looks = 0 if plan.device.capability is None else cast_tiles.COLUMNS_LOOKS
    for kernel, programs in (
        (kernels.quantize_columns_kernel, strips * tiles),
        (kernels.quantize_left_kernel, min(strips * tiles, plan.device.num_sms)),
    ):
        plan.launch(
            kernel,
            programs,
            (of.x, of.qdata, of.scale, amax, progress, left),
            (tiles, strips // of.matrices, rows, n, *of.scale_sizes, *of.q_strides, *of.scale_strides),
            {
                **kernel_constants(of.spec, COLUMNWISE),
                "TRANSPOSED": of.transposes,
                "DIRECT_CAST": plan.device.has_direct_cast,
                "EVEN": rows % TILE.m == 0 and n % TILE.n == 0,
                "LOOKS": looks,
                "TILE_M": TILE.m,
                "TILE_N": TILE.n,
                "R": TILE.rows_a_thread(VECTOR_BYTES) if of.transposes else 1,
            },
            **TILE.options(),
        )
