"""Plan the tables by which a program finds its group and its rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from tritonfp8.kernels import group_table as kernels
from tritonfp8.launch.plan import Planner, View

FIELDS = int(kernels.FIELDS.value)
# Elements of the comparison of entries with groups, all in registers. One warp needs no barriers between its steps.
ELEMENTS = 1024
WARPS = 1


class Table(NamedTuple):
    """A table of tiles.

    Attributes:
        buffer: int32, ``entries`` rows, then the number of tiles.
        entries: the most tiles that there can be.
    """

    buffer: View
    entries: int


def bounds_size(groups: int) -> int:
    """The SIZE of a kernel that looks for the bounds of groups."""
    return int(triton.next_power_of_2(groups + 1))


def _sizes(groups: int) -> dict[str, int]:
    size = bounds_size(groups)
    return {"SIZE": size, "ENTRIES": max(1, ELEMENTS // size)}


def plan_row_tiles(
    plan: Planner, offsets: View, tokens: int, tile: int, aligned: bool, step: int = 1, in_turn: bool = False
) -> Table:
    """The tiles of ``tile`` rows: aligned with columns, for casts; or none of them empty, for GEMMs.

    With ``step`` tiles begin at multiples of it, so that the first of a group may begin before the group. With
    ``in_turn`` the groups take turns: their first tiles come before their second ones.
    """
    (groups,) = offsets.shape
    before = (step - 1) * (groups + 1)
    entries = -(-(tokens + before) // tile) + groups + (tokens // tile if aligned else 1)
    buffer = plan.empty((entries * FIELDS + 1,), torch.int32)
    sizes = _sizes(groups)
    plan.launch(
        kernels.row_tiles_kernel,
        -(-entries // sizes["ENTRIES"]),
        (offsets, buffer),
        (tokens, groups, entries),
        {"TILE": tile, "ALIGNED": aligned, "IN_TURN": in_turn, "STEP": step, **sizes},
        num_warps=WARPS,
    )
    return Table(buffer, entries)


def plan_largest_first(plan: Planner, offsets: View, tokens: int) -> Table:
    """The groups, the one with most tokens first."""
    (groups,) = offsets.shape
    buffer = plan.empty((groups * FIELDS,), torch.int32)
    sizes = _sizes(groups)
    plan.launch(
        kernels.largest_first_kernel,
        -(-groups // sizes["ENTRIES"]),
        (offsets, buffer),
        (tokens, groups),
        sizes,
        num_warps=WARPS,
    )
    return Table(buffer, groups)
