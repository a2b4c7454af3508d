"""The table of tiles that casts of picked rows read."""

import pytest
import torch
import triton
from cases import each_device

from tritonfp8.kernels import group_table as kernels
from tritonfp8.launch.group_table import ELEMENTS, FIELDS
from tritonfp8.specs import GROUP_ALIGNMENT, grouped_columns

ENDS = {
    "one": [300],
    "uniform": [256, 512, 768, 1024],
    "empty": [0, 0, 700, 700, 1000],
    "all empty": [0, 0, 0],
    "unaligned": [1, 130, 131, 900, 1027],
    "large last": [10, 20, 30, 5000],
}


def table(ends, tokens, in_turn, device):
    """Tiles of groups, tiles of no group, and the number of tiles."""
    groups, tiles = len(ends), grouped_columns(tokens, len(ends)) // GROUP_ALIGNMENT
    entries = -(-tokens // GROUP_ALIGNMENT) + tiles
    size = triton.next_power_of_2(groups + 1)
    found = torch.full((entries * FIELDS + 1,), -1, dtype=torch.int32, device=device)
    kernels.row_tiles_kernel[(triton.cdiv(entries * size, ELEMENTS),)](
        torch.tensor(ends, dtype=torch.int32, device=device), found, tokens, groups, entries,
        TILE=GROUP_ALIGNMENT, ALIGNED=True, IN_TURN=in_turn, STEP=1, SIZE=size, ENTRIES=ELEMENTS // size,
        DEPENDENT=False,
    )  # fmt: skip
    *rows, count = found.tolist()
    rows = [tuple(rows[i : i + FIELDS]) for i in range(0, len(rows), FIELDS)]
    return rows[:tiles], rows[tiles:], count


@each_device
@pytest.mark.parametrize("rest", [0, 500])
@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
def test_groups_take_turns(device, ends, rest):
    """The same tiles, the tiles of one place of all groups together; tiles of no group where they were."""
    tokens = ends[-1] + rest
    ordered, *others = table(ends, tokens, False, device)
    in_turn, *others_in_turn = table(ends, tokens, True, device)
    assert others_in_turn == others
    assert sorted(in_turn) == sorted(ordered)

    def turn(tile):
        group, row, _, start = tile
        return row - start, group

    assert in_turn == sorted(ordered, key=turn)
