"""One pass over groups of rows, or over matrices, that quantizes each in one orientation or both."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonfp8.kernels.cast import groups as kernels
from tritonfp8.launch.casts.partial_maxima import PartialMaxima
from tritonfp8.launch.casts.side import META, Side, both, side_constants
from tritonfp8.launch.group_table import plan_row_tiles
from tritonfp8.launch.plan import Planner, View, kernel_constants
from tritonfp8.launch.rows import add_swiglu
from tritonfp8.specs import (
    COLUMNWISE,
    GROUP_ALIGNMENT,
    ROWWISE,
    TENSORWISE,
    QuantSpec,
    empty_grouped_scale,
    group_amax_sizes,
    grouped_columns,
    transposed,
)
from tritonfp8.specs.formats import FORMATS
from tritonfp8.tuning import VECTOR_BYTES, BlockShape, cast_tiles

# Rows of a tile: as many tokens as the columns at whose multiples groups begin.
TILE = cast_tiles.GROUPS
assert TILE.m == GROUP_ALIGNMENT


class Groups(NamedTuple):
    """What is cast: rows ``[tokens, width]``, and how they are divided into groups.

    Attributes:
        x: all rows.
        groups: how many groups there are.
        rows: of each group, if they are matrices; else 0.
        offsets: the end of each group; None for matrices.
        picked: the rows of ``x`` that are cast; None for all.
        factors: of these rows, or None.
        gate_up: where ``x`` is the gradient of SwiGLU's result, what SwiGLU was of; else None.
        swiglu: whether SwiGLU of ``x`` is cast; with ``gate_up``, its gradient.
        amax: the amaxes of what is cast, if they are known.
        codes: ``"codes"`` if ``x`` has codes, whose values are cast; ``"cast"`` if it has the values of codes, which
            are made again. Codes with a scale a row have these as ``factors``.
        tiles: the table of tiles, if it was made.
    """

    x: View
    groups: int
    rows: int
    offsets: View | None
    picked: View | None = None
    factors: View | None = None
    gate_up: View | None = None
    swiglu: bool = False
    amax: View | None = None
    codes: str = ""
    tiles: tuple[View, int] | None = None

    @property
    def tokens(self) -> int:
        """Rows of all groups and of none."""
        return (self.x if self.picked is None else self.picked).shape[0]

    @property
    def width(self) -> int:
        """Columns that are cast."""
        n = self.x.shape[1]
        if not self.swiglu:
            return n
        return n // 2 if self.gate_up is None else 2 * n

    @property
    def source(self) -> str:
        """How the kernels read rows (kernels/cast/group_rows.py)."""
        if self.picked is None:
            return self.codes or "rows"
        return "picked" if self.factors is None else "scaled"

    def sources(self) -> tuple[View, View | None, View | None]:
        """The pointers of what is read."""
        return self.x, self.picked, self.factors

    def made(self, x: View, amax: View | None = None) -> Groups:
        """The same groups, once SwiGLU was computed."""
        return self._replace(x=x, gate_up=None, swiglu=False, amax=amax)

    @property
    def is_matrices(self) -> bool:
        """Whether the groups are matrices of equal size."""
        return self.offsets is None

    @property
    def blocks(self) -> int:
        """Tiles of rows that belong to groups."""
        if self.is_matrices:
            return self.groups * -(-self.rows // TILE.m)
        return grouped_columns(self.tokens, self.groups) // GROUP_ALIGNMENT

    def table(self, plan: Planner) -> tuple[View, int]:
        """The table of tiles and its entries; for matrices, which need none, anything."""
        if self.tiles is not None or self.offsets is None:
            return self.tiles or (self.x, 0)
        # Rows of a group are picked in the order of the tokens, so groups that take turns read the same tokens at the
        # same time, and the cache has most of them.
        in_turn = self.picked is not None
        found = plan_row_tiles(plan, self.offsets, self.tokens, TILE.m, aligned=True, in_turn=in_turn)
        return found.buffer, found.entries


def of_empty_groups(twin: Callable[..., Any]) -> Callable[..., Any]:
    """What serves calls without elements: the reference. Their groups are empty, so the host need not read offsets."""
    place = list(inspect.signature(twin).parameters).index("offsets")

    def serve(*args: Any) -> Any:
        if any(isinstance(x, Tensor) and not x.is_contiguous() for x in args):
            return None
        return twin(*args[:place], torch.zeros(args[place].shape, dtype=torch.int32), *args[place + 1 :])

    return serve


def side_of_tokens(plan: Planner, of: Groups, spec: QuantSpec, transpose: bool) -> tuple[Side, View, View]:
    """Allocate a result of groups of tokens: the side, and its views as the caller gets them."""
    tokens, width = of.tokens, of.width
    layout = "columns" if transpose else "rows"
    shape = (width, grouped_columns(tokens, of.groups)) if transpose else (tokens, width)
    qdata = plan.empty(shape, FORMATS[spec.format].dtype)
    scale = plan.like(empty_grouped_scale(shape, spec, layout, of.groups, META))
    row, col = scale.strides
    block = spec.block
    if not transpose:
        side = Side(qdata, (*qdata.strides, 0), scale, (row, col, row), (1, scale.shape[1]), block, spec)
    elif block[1] == -1:
        # One scale for each group.
        side = Side(
            qdata, (*qdata.strides[::-1], 0), scale, (0, row, col), (1, scale.shape[0]), transposed(block), spec
        )
    else:
        side = Side(qdata, (*qdata.strides[::-1], 0), scale, (col, row, 0), scale.shape[::-1], transposed(block), spec)
    return side, qdata, scale


def side_of_matrices(plan: Planner, shape: Sequence[int], spec: QuantSpec, transpose: bool) -> tuple[Side, View, View]:
    """Allocate a result of matrices ``[groups, n, k]``: the side, and its views as the caller gets them."""
    groups, n, k = shape
    sizes = (groups, k, n) if transpose else (groups, n, k)
    qdata = plan.empty(sizes, FORMATS[spec.format].dtype)
    scale = plan.like(empty_grouped_scale(sizes, spec, "matrices", groups, META))
    q_group, q_row, q_col = qdata.strides
    group, row, col = scale.strides
    side = Side(qdata, (q_row, q_col, q_group), scale, (row, col, group), scale.shape[1:], spec.block, spec)
    return side.swapped() if transpose else side, qdata, scale


def with_maxima(
    plan: Planner, of: Groups, table: tuple[View, int], blocks: Collection[BlockShape], out: View | None = None
) -> Groups:
    """``of`` with the amaxes of ``blocks``, found in one pass over the rows, in which SwiGLU is computed.

    ``out`` is where its result is written, contiguous and possibly ``of.gate_up``; None allocates it.
    """
    rows, n = of.tokens, of.width
    sizes = group_amax_sizes(rows, n, of.groups, blocks)
    amax = plan.empty((sum(sizes.values()),), torch.int32, zeroed=True)
    parts = _parts(amax, sizes)
    if of.swiglu:
        tile = cast_tiles.AMAX_OF_SWIGLU if of.gate_up is None else cast_tiles.AMAX_OF_ITS_GRADIENT
    elif of.codes:
        tile = cast_tiles.AMAX_OF_CODES
    else:
        tile = cast_tiles.amax_pass(n, set(sizes)).tile if of.is_matrices else cast_tiles.amax_of_groups(n, set(sizes))
    halves = 1 if of.gate_up is None else 2
    strips = -(-n // halves // tile.n)
    lines = PartialMaxima.allocate(plan, of.x, rows, 0, halves * strips, 0) if ROWWISE in sizes else None
    # What is not found is not written: any pointer will do.
    maxima = (of.x if lines is None else lines.buffer, *(parts.get(block, of.x) for block in (COLUMNWISE, TENSORWISE)))
    found = {name: block in sizes for name, block in (("ROW", ROWWISE), ("COL", COLUMNWISE), ("WHOLE", TENSORWISE))}
    tiles = {**tile.sizes(), "R": tile.rows_a_thread(VECTOR_BYTES // of.x.itemsize)}
    stride = 0 if lines is None else lines.lines
    made = of.x
    if of.swiglu:
        made = plan.empty((rows, n), of.x.dtype) if out is None else out
        gate_up = of.x if of.gate_up is None else of.gate_up
        plan.launch(
            kernels.group_swiglu_kernel,
            of.blocks * strips,
            (of.x, gate_up, made, table[0], *maxima),
            (of.blocks, table[1], n // halves, *of.x.strides, *gate_up.strides, stride),
            {**found, "BACKWARD": of.gate_up is not None, "ALIGNMENT": TILE.m, **tiles},
            **tile.options(),
        )
    else:
        plan.launch(
            kernels.group_amax_kernel,
            of.blocks * strips,
            (*of.sources(), table[0], *maxima),
            (of.blocks, table[1], of.rows, n, *of.x.strides, stride),
            {**found, "MATRICES": of.is_matrices, "ALIGNMENT": TILE.m, "SOURCE": of.source, **tiles},
            **tile.options(),
        )
    if lines is not None:
        lines.reduce(plan, parts[ROWWISE].strided((1, rows), (rows, 1)))
    return of.made(made, amax)


def _parts(amax: View, sizes: Mapping[BlockShape, int]) -> dict[BlockShape, View]:
    starts = itertools.accumulate(sizes.values(), initial=0)
    # An amax that a caller gave ends without the padding.
    return {
        block: amax.strided((min(size, amax.numel() - start),), (1,), start)
        for (block, size), start in zip(sizes.items(), starts, strict=False)
    }


def _with_amax(
    plan: Planner, of: Groups, table: tuple[View, int], sides: Sequence[Side | None]
) -> tuple[Groups, list[Side | None]]:
    """``sides`` with the amaxes of blocks that span a whole dim, and the groups once SwiGLU was computed."""
    blocks = {side.block for side in sides if side is not None and -1 in side.block}
    if not blocks:
        return of.made(add_swiglu(plan, of.x, of.gate_up)) if of.swiglu else of, list(sides)
    given = of.amax is not None
    if not given:
        of = with_maxima(plan, of, table, blocks)
    assert of.amax is not None
    parts = _parts(of.amax, group_amax_sizes(of.tokens, of.width, of.groups, blocks))
    strides = {ROWWISE: (1, 0, of.rows), COLUMNWISE: (0, 1, of.width), TENSORWISE: (0, 0, 1)}
    return of, [
        side._replace(amax=parts[side.block], amax_strides=strides[side.block], parts=1, given=given)
        if side is not None and side.block in parts
        else side
        for side in sides
    ]


def plan_sides(
    plan: Planner,
    of: Groups,
    side: Side | None,
    side_t: Side | None,
    codes: bool = False,
    read: Side | None = None,
    with_sums: bool = False,
) -> View | None:
    """Fill one or two sides from the rows of ``of``; with sums return ``[parts, n]``, float32, partial sums of rows.

    Args:
        plan: takes the launches.
        of: what is cast.
        side, side_t: the results, untransposed and transposed.
        codes: whether the second is made from the codes of the first.
        read: the scales of ``of``, if it has codes or values that codes are made of.
        with_sums: of one matrix whose untransposed side is filled.
    """
    table = of.table(plan)
    of, (side, side_t) = _with_amax(plan, of, table, (side, side_t))
    first, second = both(side or read, side_t)
    n = of.width
    if codes or read is not None:
        tile = cast_tiles.of_codes(first.block, of.codes or "both")
    else:
        tile = cast_tiles.of_groups({first.block, second.block}, of.source == "scaled")
    sums = plan.empty((of.blocks, n), torch.float32) if with_sums else None
    plan.launch(
        kernels.quantize_groups_kernel,
        of.blocks * -(-n // tile.n),
        (*of.sources(), table[0], *first.pointers(), *second.pointers(), of.x if sums is None else sums),
        (
            of.blocks, table[1], of.groups, of.rows, n, *of.x.strides,
            *first.scale_sizes, *first.q_strides[:2], *first.scale_strides, *first.amax_strides,
            *second.scale_sizes, *second.q_strides, *second.scale_strides, *second.amax_strides,
        ),
        {
            **side_constants(side or read, side_t), "NORMAL": side is not None,
            "DIRECT_CAST": plan.device.has_direct_cast, "MATRICES": of.is_matrices,
            "SOURCE": of.source, "CODES": codes or read is not None, "SUM": with_sums,
            "EVEN": n % tile.n == 0 and of.rows % tile.m == 0, **tile.stores(side_t is not None), "GROUP": tile.group,
        },
        **tile.options(),
    )  # fmt: skip
    if side is not None and not of.is_matrices:
        _plan_rest(plan, of, table, side)
    return sums


def _plan_rest(plan: Planner, of: Groups, table: tuple[View, int], side: Side) -> None:
    """Fill the rows of no group: few, as a rule none."""
    rows, n = of.tokens, of.width
    tile = cast_tiles.REST
    plan.launch(
        kernels.quantize_rest_kernel,
        min(plan.device.num_sms, -(-rows // TILE.m) * -(-n // tile.n)),
        (*of.sources(), table[0], *side.pointers()),
        (
            of.blocks, table[1], n, *of.x.strides, side.scale_sizes[1], *side.q_strides[:2], *side.scale_strides[:2],
            *side.amax_strides[:2],
        ),
        {
            **kernel_constants(side.spec, side.block),
            "PARTS": int(side.amax is not None),
            "DIRECT_CAST": plan.device.has_direct_cast,
            "SOURCE": of.source,
            **tile.sizes(),
        },
        **tile.options(),
    )  # fmt: skip
