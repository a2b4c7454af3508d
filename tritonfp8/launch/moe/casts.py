"""The casts of groups: the Triton twin of each in :mod:`tritonfp8.reference.grouped`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tritonfp8 import reference
from tritonfp8.formats import FORMATS, SCALE_FORMATS
from tritonfp8.kernels.moe import casts as kernels
from tritonfp8.launch.cast import plan_quantize
from tritonfp8.launch.executor import planned
from tritonfp8.launch.moe.schedule import bounds_size, plan_row_tiles
from tritonfp8.launch.partial_maxima import PartialMaxima
from tritonfp8.launch.plan import Planner, View, kernel_constants
from tritonfp8.specs import (
    COLUMNWISE,
    GROUP_ALIGNMENT,
    ROWWISE,
    TENSORWISE,
    QuantSpec,
    check_group_spec,
    empty_grouped_scale,
    grouped_columns,
    spec_of,
    transposed,
)
from tritonfp8.tuning import VECTOR_BYTES, BlockShape, cast_tiles

META = torch.device("meta")
# Rows of a tile: as many tokens as the columns at whose multiples groups begin.
TILE = cast_tiles.GROUPS
assert TILE.m == GROUP_ALIGNMENT


class _Groups(NamedTuple):
    """What is cast: rows ``[rows, N]``, and how they are divided into groups.

    Attributes:
        x: all rows.
        groups: how many groups there are.
        rows: of each group, if they are matrices; else 0.
        offsets: the end of each group; None for matrices.
    """

    x: View
    groups: int
    rows: int
    offsets: View | None

    @property
    def is_matrices(self) -> bool:
        return self.offsets is None

    @property
    def blocks(self) -> int:
        """Tiles of rows that belong to groups."""
        if self.is_matrices:
            return self.groups * -(-self.rows // TILE.m)
        return grouped_columns(self.x.shape[0], self.groups) // GROUP_ALIGNMENT

    def table(self, plan: Planner) -> tuple[View, int]:
        """The table of tiles and its entries; for matrices, which need none, anything."""
        if self.offsets is None:
            return self.x, 0
        found = plan_row_tiles(plan, self.offsets, self.x.shape[0], TILE.m, aligned=True)
        return found.buffer, found.entries


class _Side(NamedTuple):
    """One result, in the coordinates of ``x``; strides of rows, columns and groups.

    Attributes:
        qdata, q_strides: the codes.
        scale, scale_strides, scale_sizes: the scales, and how many rows and columns of them a group has.
        block, spec: of the scales.
        amax, amax_strides: amax bits, if no tile holds a block whole.
    """

    qdata: View
    q_strides: tuple[int, ...]
    scale: View
    scale_strides: tuple[int, ...]
    scale_sizes: tuple[int, ...]
    block: BlockShape
    spec: QuantSpec
    amax: View | None = None
    amax_strides: tuple[int, int, int] = (0, 0, 0)

    def pointers(self) -> list[View]:
        exponent_only = SCALE_FORMATS[self.spec.scale_format].exponent_only
        scale = self.scale.retyped(torch.uint8) if exponent_only else self.scale
        return [self.qdata, scale, scale if self.amax is None else self.amax]

    def swapped(self) -> _Side:
        """The same result in the coordinates of the transpose of each matrix."""
        (q_row, q_col, q_group), (row, col, group) = self.q_strides, self.scale_strides
        return self._replace(
            q_strides=(q_col, q_row, q_group),
            scale_strides=(col, row, group),
            scale_sizes=self.scale_sizes[::-1],
            block=transposed(self.block),
        )


def _side_of_tokens(plan: Planner, of: _Groups, spec: QuantSpec, transpose: bool) -> tuple[_Side, View, View]:
    tokens, width = of.x.shape
    layout = "columns" if transpose else "rows"
    shape = (width, grouped_columns(tokens, of.groups)) if transpose else (tokens, width)
    qdata = plan.empty(shape, FORMATS[spec.format].dtype)
    scale = plan.like(empty_grouped_scale(shape, spec, layout, of.groups, META))
    row, col = scale.strides
    block = spec.block
    if not transpose:
        side = _Side(qdata, (*qdata.strides, 0), scale, (row, col, row), (1, scale.shape[1]), block, spec)
    elif block[1] == -1:
        # One scale for each group.
        side = _Side(
            qdata, (*qdata.strides[::-1], 0), scale, (0, row, col), (1, scale.shape[0]), transposed(block), spec
        )
    else:
        side = _Side(qdata, (*qdata.strides[::-1], 0), scale, (col, row, 0), scale.shape[::-1], transposed(block), spec)
    return side, qdata, scale


def _side_of_matrices(
    plan: Planner, shape: Sequence[int], spec: QuantSpec, transpose: bool
) -> tuple[_Side, View, View]:
    groups, n, k = shape
    sizes = (groups, k, n) if transpose else (groups, n, k)
    qdata = plan.empty(sizes, FORMATS[spec.format].dtype)
    scale = plan.like(empty_grouped_scale(sizes, spec, "matrices", groups, META))
    q_group, q_row, q_col = qdata.strides
    group, row, col = scale.strides
    side = _Side(qdata, (q_row, q_col, q_group), scale, (row, col, group), scale.shape[1:], spec.block, spec)
    return side.swapped() if transpose else side, qdata, scale


def _with_amax(
    plan: Planner, of: _Groups, table: tuple[View, int], sides: Sequence[_Side | None]
) -> list[_Side | None]:
    """``sides`` with the amax of blocks that span a whole dim, in one pass over ``x``."""
    rows, n = of.x.shape
    blocks = {s.block for s in sides if s is not None and -1 in s.block}
    if not blocks:
        return list(sides)
    row, col, whole = (block in blocks for block in (ROWWISE, COLUMNWISE, TENSORWISE))
    tile = cast_tiles.amax_pass(n, blocks).tile
    strips = -(-n // tile.n)
    lines = PartialMaxima.allocate(plan, of.x, rows, 0, strips, 0) if row else None
    of_columns = plan.empty((of.groups, n), torch.int32, zeroed=True) if col else None
    of_whole = plan.empty((of.groups,), torch.int32, zeroed=True) if whole else None
    plan.launch(
        kernels.group_amax_kernel,
        of.blocks * strips,
        (of.x, table[0], of.x if lines is None else lines.buffer, of_columns or of.x, of_whole or of.x),
        (of.blocks, table[1], of.rows, n, *of.x.strides, 0 if lines is None else lines.lines),
        {
            "ROW": row, "COL": col, "WHOLE": whole, "MATRICES": of.is_matrices, "ALIGNMENT": TILE.m,
            "TILE_M": tile.m, "TILE_N": tile.n, "R": tile.rows_a_thread(VECTOR_BYTES // of.x.itemsize),
        },
        **tile.options(),
    )  # fmt: skip
    found: dict[BlockShape, tuple[View, tuple[int, int, int]]] = {}
    if lines is not None:
        found[ROWWISE] = lines.reduce(plan)[0], (1, 0, of.rows)
    if of_columns is not None:
        found[COLUMNWISE] = of_columns, (0, 1, n)
    if of_whole is not None:
        found[TENSORWISE] = of_whole, (0, 0, 1)
    return [
        s._replace(amax=found[s.block][0], amax_strides=found[s.block][1]) if s is not None and s.block in found else s
        for s in sides
    ]


def _plan_sides(plan: Planner, of: _Groups, side: _Side | None, side_t: _Side | None) -> None:
    """Fill one or two sides from the rows of ``of``."""
    table = of.table(plan)
    side, side_t = _with_amax(plan, of, table, (side, side_t))
    first, second = side or side_t, side_t or side
    assert first is not None
    assert second is not None
    _, n = of.x.shape
    tile = cast_tiles.of_groups({first.block, second.block})
    constants = {
        **kernel_constants(first.spec, first.block),
        "PARTS": int(first.amax is not None),
        **kernel_constants(second.spec, second.block, "_T"),
        "PARTS_T": int(second.amax is not None),
        "NORMAL": side is not None,
        "TRANSPOSED": side_t is not None,
        "DIRECT_CAST": plan.device.has_direct_cast,
        "MATRICES": of.is_matrices,
        "EVEN": n % tile.n == 0 and of.rows % tile.m == 0,
        "TILE_M": tile.m,
        "TILE_N": tile.n,
        "R": tile.rows_a_thread(VECTOR_BYTES) if side_t is not None else 1,
        "GROUP": tile.group,
    }
    plan.launch(
        kernels.quantize_groups_kernel,
        of.blocks * -(-n // tile.n),
        (of.x, table[0], *first.pointers(), *second.pointers()),
        (
            of.blocks, table[1], of.groups, of.rows, n, *of.x.strides,
            *first.scale_sizes, *first.q_strides[:2], *first.scale_strides, *first.amax_strides,
            *second.scale_sizes, *second.q_strides, *second.scale_strides, *second.amax_strides,
        ),
        constants,
        **tile.options(),
    )  # fmt: skip
    if side is not None and not of.is_matrices:
        _plan_rest(plan, of, table, side)


def _plan_rest(plan: Planner, of: _Groups, table: tuple[View, int], side: _Side) -> None:
    """Fill the rows of no group: few, as a rule none."""
    rows, n = of.x.shape
    tile = cast_tiles.REST
    plan.launch(
        kernels.quantize_rest_kernel,
        min(plan.device.num_sms, -(-rows // TILE.m) * -(-n // tile.n)),
        (of.x, table[0], *side.pointers()),
        (
            of.blocks, table[1], n, *of.x.strides, side.scale_sizes[1], *side.q_strides[:2], *side.scale_strides[:2],
            *side.amax_strides[:2],
        ),
        {
            **kernel_constants(side.spec, side.block),
            "PARTS": int(side.amax is not None),
            "DIRECT_CAST": plan.device.has_direct_cast,
            "TILE_M": tile.m,
            "TILE_N": tile.n,
        },
        **tile.options(),
    )  # fmt: skip


def _tokens(x: View, offsets: View) -> _Groups | None:
    """Tokens as the kernel reads them; None if it cannot."""
    return _Groups(x, offsets.shape[0], 0, offsets) if x.numel() and offsets.is_contiguous() else None


def plan_quantize_groups(plan: Planner, x: View, offsets: View, spec: str, transpose: bool) -> list[View] | None:
    """Outputs: qdata, scale."""
    found = spec_of(spec)
    of = _tokens(x, offsets)
    if of is None:
        return None
    if not transpose and found.block[0] == 1:
        # No scale belongs to two rows, so groups do not matter.
        return plan_quantize(plan, x, None, spec, False)
    side, qdata, scale = _side_of_tokens(plan, of, found, transpose)
    _plan_sides(plan, of, None if transpose else side, side if transpose else None)
    return [qdata, scale]


def quantize_groups(x: Tensor, offsets: Tensor, spec: str, transpose: bool = False) -> tuple[Tensor, Tensor]:
    """Launch the twin of :func:`tritonfp8.reference.quantize_groups`."""
    if not transpose:
        check_group_spec(spec_of(spec), "rows")
    results = planned(plan_quantize_groups, (x, offsets), (spec, transpose))
    if results is not None:
        return results[0], results[1]
    if not x.numel():
        return _empty_groups(x, offsets, spec, transpose)
    return quantize_groups(x.contiguous(), offsets.contiguous(), spec, transpose)


def _empty_groups(x: Tensor, offsets: Tensor, spec: str, transpose: bool) -> tuple[Tensor, Tensor]:
    """Of tensors without elements, whose groups are empty: no offset has to be read."""
    return reference.quantize_groups(x, torch.zeros(offsets.shape, dtype=torch.int32), spec, transpose)


def plan_quantize_groups_both(plan: Planner, x: View, offsets: View, spec: str, spec_t: str) -> list[View] | None:
    """Outputs: qdata, scale, and those of the transpose."""
    of = _tokens(x, offsets)
    if of is None:
        return None
    side, qdata, scale = _side_of_tokens(plan, of, spec_of(spec), False)
    side_t, qdata_t, scale_t = _side_of_tokens(plan, of, spec_of(spec_t), True)
    _plan_sides(plan, of, side, side_t)
    return [qdata, scale, qdata_t, scale_t]


def quantize_groups_both(x: Tensor, offsets: Tensor, spec: str, spec_t: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the twin of :func:`tritonfp8.reference.quantize_groups_both`."""
    check_group_spec(spec_of(spec), "rows")
    results = planned(plan_quantize_groups_both, (x, offsets), (spec, spec_t))
    if results is not None:
        qdata, scale, qdata_t, scale_t = results
        return qdata, scale, qdata_t, scale_t
    if not x.numel():
        return *_empty_groups(x, offsets, spec, False), *_empty_groups(x, offsets, spec_t, True)
    return quantize_groups_both(x.contiguous(), offsets.contiguous(), spec, spec_t)


def _matrices(x: View) -> tuple[_Groups, bool] | None:
    """Matrices as the kernel reads them, and whether it reads their transposes; None if they must be copied first."""
    if not x.numel():
        return None
    groups, n, k = x.shape
    if x.is_contiguous():
        return _Groups(x.strided((groups * n, k), (k, 1)), groups, n, None), False
    if x.transposed(1, 2).is_contiguous():
        return _Groups(x.strided((groups * k, n), (n, 1)), groups, k, None), True
    return None


def plan_quantize_matrices(plan: Planner, x: View, spec: str, transpose: bool) -> list[View] | None:
    """Outputs: qdata, scale."""
    matrices = _matrices(x)
    if matrices is None:
        return None
    of, swaps = matrices
    found = spec_of(spec)
    side, qdata, scale = _side_of_matrices(plan, x.shape, found, transpose)
    if swaps:
        side = side.swapped()
    if (
        not transpose
        and not swaps
        and (found.block[0] == 1 or (found.block[0] != -1 and of.rows % found.block[0] == 0))
    ):
        # No scale belongs to two matrices, so they are one.
        whole = plan_quantize(plan, of.x, None, spec, False)
        assert whole is not None
        return [whole[0].strided(qdata.shape, qdata.strides), whole[1].strided(scale.shape, scale.strides)]
    stays = transpose == swaps
    _plan_sides(plan, of, side if stays else None, None if stays else side)
    return [qdata, scale]


def quantize_matrices(x: Tensor, spec: str, transpose: bool = False) -> tuple[Tensor, Tensor]:
    """Launch the twin of :func:`tritonfp8.reference.quantize_matrices`."""
    results = planned(plan_quantize_matrices, (x,), (spec, transpose))
    if results is not None:
        return results[0], results[1]
    return (
        reference.quantize_matrices(x, spec, transpose)
        if not x.numel()
        else quantize_matrices(x.contiguous(), spec, transpose)
    )


def plan_grouped_sum(plan: Planner, x: View, offsets: View) -> list[View] | None:
    """One output, ``[groups, N]``."""
    of = _tokens(x, offsets)
    if of is None:
        return None
    tokens, n = x.shape
    out = plan.empty((of.groups, n), x.dtype)
    table, _ = of.table(plan)
    parts = plan.empty((of.blocks, n), torch.float32)
    tile = TILE
    plan.launch(
        kernels.partial_sums_kernel,
        of.blocks * -(-n // tile.n),
        (x, table, parts),
        (n, *x.strides),
        {"TILE_M": tile.m, "TILE_N": tile.n},
        **tile.options(),
    )
    final = cast_tiles.GROUP_SUMS
    plan.launch(
        kernels.group_sums_kernel,
        of.groups * -(-n // final.n),
        (parts, offsets, out),
        (tokens, of.groups, n),
        {"TILE": tile.m, "TILE_P": final.m, "TILE_N": final.n, "SIZE": bounds_size(of.groups)},
        **final.options(),
    )
    return [out]


def grouped_sum(x: Tensor, offsets: Tensor) -> Tensor:
    """Launch the twin of :func:`tritonfp8.reference.grouped_sum`."""
    results = planned(plan_grouped_sum, (x, offsets), ())
    if results is not None:
        return results[0]
    return (
        x.new_zeros((len(offsets), x.shape[1])) if not x.numel() else grouped_sum(x.contiguous(), offsets.contiguous())
    )
