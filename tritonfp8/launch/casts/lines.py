"""Casts to scales of whole lines that read each element once: of columns; of rows, with the amaxes of columns."""

from __future__ import annotations

import torch
import triton

from tritonfp8.kernels.cast import columns as kernels
from tritonfp8.kernels.cast import rows as row_kernels
from tritonfp8.launch.casts.groups import Groups
from tritonfp8.launch.casts.partial_maxima import PartialMaxima, magnitude_dtype
from tritonfp8.launch.casts.side import Side
from tritonfp8.launch.group_table import bounds_size
from tritonfp8.launch.plan import Planner, View, kernel_constants
from tritonfp8.specs import COLUMNWISE, GROUP_ALIGNMENT, ROWWISE, QuantSpec
from tritonfp8.tuning import cast_tiles

TILE = cast_tiles.COLUMNS


def run_together(rows: int, num_sms: int) -> bool:
    """Whether the tiles of a strip of columns run at the same time on a GPU that does nothing else."""
    return -(-rows // TILE.m) <= cast_tiles.COLUMNS_PER_SM * num_sms


def plan_columns(plan: Planner, x: View, matrices: int, side: Side, transposes: bool) -> None:
    """Fill a side from matrices that :func:`run_together` serves; from others slowly.

    Args:
        plan: takes the launches.
        x: the matrices, contiguous, one below the other, ``[matrices * rows, n]``.
        matrices: how many there are.
        side: the result.
        transposes: whether its codes are stored transposed.
    """
    rows, n = x.shape[0] // matrices, x.shape[1]
    tiles, strips = -(-rows // TILE.m), matrices * -(-n // TILE.n)
    columns = matrices * n
    zeros = plan.empty((columns + 2 + strips,), torch.int32, zeroed=True)
    amax, progress = zeros.strided((columns,), (1,)), zeros.strided((2 + strips,), (1,), columns)
    left = plan.empty((strips * tiles,), torch.int32)
    # The interpreter runs one program after another.
    looks = 0 if plan.device.capability is None else cast_tiles.COLUMNS_LOOKS
    qdata, scale, _ = side.pointers()
    for kernel, programs in (
        (kernels.quantize_columns_kernel, strips * tiles),
        (kernels.quantize_left_kernel, min(strips * tiles, plan.device.num_sms)),
    ):
        plan.launch(
            kernel,
            programs,
            (x, qdata, scale, amax, progress, left),
            (tiles, strips // matrices, rows, n, *side.scale_sizes, *side.q_strides, *side.scale_strides),
            {
                **kernel_constants(side.spec, COLUMNWISE),
                "TRANSPOSED": transposes,
                "DIRECT_CAST": plan.device.has_direct_cast,
                "EVEN": TILE.holds_whole(rows, n),
                "LOOKS": looks,
                **TILE.stores(transposes),
            },
            **TILE.options(),
        )


def can_plan_rows(x: View, codes: bool = False) -> bool:
    """Whether :func:`plan_rows` takes the matrix ``x``: its rows are contiguous and fit in a tile."""
    return x.strides[1] == 1 and cast_tiles.rows_with_columns(x.shape[1], x.itemsize, codes) is not None


def plan_rows(
    plan: Planner,
    x: View,
    matrices: int,
    spec: QuantSpec,
    qdata: View,
    scale: View,
    codes: bool = False,
    with_sums: bool = False,
) -> tuple[View, View | None]:
    """Fill the result.

    Returns:
        The amaxes of the columns of each matrix, float32 ``[matrices, n]``. With sums ``[parts, n]``, float32, partial
        sums of the rows of ``x``.

    Args:
        plan: takes the launch.
        x: the matrices, one below the other, ``[matrices * rows, n]``; see :func:`can_plan_rows`.
        matrices: how many there are.
        spec: of the result, whose scales are of rows.
        qdata: the codes, of the shape of ``x``, rows contiguous.
        scale: ``[matrices * rows, 1]``.
        codes: whether the amaxes are of the values of the codes.
    """
    n = x.shape[1]
    rows = x.shape[0] // matrices
    tile = cast_tiles.rows_with_columns(n, x.itemsize, codes)
    assert tile is not None
    # As many programs as run at once, so that each finds the amaxes of as many rows as it can.
    programs = max(1, plan.device.num_sms * cast_tiles.ROWS_WARPS // tile.warps // matrices)
    tiles = triton.cdiv(triton.cdiv(rows, tile.m), programs)
    chunks = triton.cdiv(rows, tiles * tile.m)
    # 16 bits hold the values of codes.
    measured = x._replace(dtype=torch.bfloat16) if codes else x
    maxima = PartialMaxima.allocate(plan, measured, 0, matrices * n, 0, chunks)
    sums = plan.empty((matrices * chunks, n), torch.float32) if with_sums else None
    plan.launch(
        row_kernels.quantize_rows_kernel,
        matrices * chunks,
        (x, qdata, scale, maxima.buffer, x if sums is None else sums),
        (rows, n, tiles, chunks, maxima.lines, x.strides[0], qdata.strides[0], scale.strides[0]),
        {
            **kernel_constants(spec, ROWWISE),
            "DIRECT_CAST": plan.device.has_direct_cast,
            "CODES": codes,
            "SUM": with_sums,
            "EVEN": rows % tile.m == 0 and n == tile.n,
            **tile.sizes(),
            "STAGES": cast_tiles.ROWS_STAGES,
        },
        **tile.options(),
    )
    amax = plan.empty((1, matrices * n), torch.float32)
    maxima.reduce(plan, amax)
    return amax.strided((matrices, n), (n, 1)), sums


def plan_group_rows(plan: Planner, of: Groups, table: tuple[View, int], side: Side) -> View:
    """Fill a side whose scales are of rows; the amaxes of the columns of each group's codes, int32 ``[groups * n]``.

    Args:
        plan: takes the launches.
        of: rows of groups; see :func:`can_plan_rows`.
        table: of their tiles.
        side: the result.
    """
    assert of.offsets is not None
    n = of.width
    tile = cast_tiles.rows_with_columns(n, of.x.itemsize, True)
    assert tile is not None
    programs = cast_tiles.ROUNDS_OF_GROUP_ROWS * plan.device.num_sms * cast_tiles.ROWS_WARPS // tile.warps
    each = min(triton.next_power_of_2(triton.cdiv(programs, of.blocks)), GROUP_ALIGNMENT // tile.m)
    qdata, scale, _ = side.pointers()
    # 16 bits hold the values of codes.
    parts = plan.empty((of.blocks * each, n), magnitude_dtype(torch.bfloat16))
    plan.launch(
        row_kernels.quantize_group_rows_kernel,
        of.blocks * each,
        (*of.sources(), table[0], qdata, scale, parts),
        (of.blocks, table[1], n, *of.x.strides, side.q_strides[0], side.scale_strides[0]),
        {
            **kernel_constants(side.spec, ROWWISE),
            "DIRECT_CAST": plan.device.has_direct_cast,
            "SOURCE": "swiglu" if of.swiglu else of.source,
            "EVEN": n == tile.n,
            "ALIGNMENT": GROUP_ALIGNMENT,
            "EACH": each,
            **tile.sizes(),
            "STAGES": cast_tiles.ROWS_STAGES,
        },
        **tile.options(),
    )
    amax = plan.empty((of.groups * n,), torch.int32)
    final = cast_tiles.GROUP_MAXIMA
    plan.launch(
        row_kernels.group_maxima_kernel,
        of.groups * -(-n // final.n),
        (parts, of.offsets, amax),
        (of.tokens, of.groups, n),
        {
            "ALIGNMENT": GROUP_ALIGNMENT, "EACH": each, "TILE_P": final.m, "TILE_N": final.n,
            "SIZE": bounds_size(of.groups),
        },
        **final.options(),
    )  # fmt: skip
    return amax
