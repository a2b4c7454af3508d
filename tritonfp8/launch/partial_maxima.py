"""The amax of blocks that take in a whole dim: programs find maxima over parts of it, a last launch those of the parts.

No atomics, so nothing has to be zero before, and no cast reads more maxima than data.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tritonfp8.kernels.cast.quantize import maxima_kernel
from tritonfp8.launch.kernel_cache import run

# The parts of the rows and columns of x take one such share of its memory at most.
WORKSPACE_SHARE = 4
TILE_ELEMENTS = 2048
MOST_PARTS_AT_ONCE = 256
WARPS = 4


def _magnitude_dtype(x: Tensor) -> torch.dtype:
    """Of what the kernels call magnitudes: integers that order as the magnitudes of ``x``."""
    return torch.int16 if x.element_size() == 2 else torch.int32


def row_chunks(shape: tuple[int, int], tile_rows: int, strips: int, programs: int, lines: int) -> int:
    """Into how many parts the rows of ``x [m, n]`` are split.

    One for each program of a strip of columns; no more than there are tiles; and so few that the parts of ``lines``
    rows and columns take a quarter of the memory of ``x``, which decides where ``x`` is narrow.
    """
    m, n = shape
    fit = m * n // (WORKSPACE_SHARE * max(1, lines))
    return max(1, min(programs // strips, -(-m // tile_rows), fit))


class Parts(NamedTuple):
    """Maxima of rows and of columns over parts of them.

    Attributes:
        buffer: ``[parts, rows + columns]``, magnitudes; what is beyond the parts of rows, or of columns, is not set.
        rows: how many rows are wanted, all results together; 0 for none.
        row_parts: parts of each.
        column_parts: parts of each column.
        dtype: of what the magnitudes are.
    """

    buffer: Tensor
    rows: int
    row_parts: int
    column_parts: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor, rows: int, columns: int, row_parts: int, column_parts: int) -> Parts:
        """Unset, for ``rows`` and ``columns`` (0: not wanted) of values of the dtype of ``x``."""
        parts = max(row_parts if rows else 0, column_parts if columns else 0)
        buffer = torch.empty((parts, rows + columns), dtype=_magnitude_dtype(x), device=x.device)
        # float64 is cast by way of float32.
        return cls(buffer, rows, row_parts, column_parts, x.dtype if x.element_size() == 2 else torch.float32)

    @property
    def groups(self) -> int:
        """Rows and columns; also the elements from one part of a group to the next."""
        return self.buffer.shape[1]

    def pointers(self) -> tuple[Tensor, Tensor]:
        """Where the parts of rows begin, and those of columns."""
        return self.buffer, self.buffer[:, self.rows :] if self.rows < self.groups else self.buffer

    def unjoined(self) -> tuple[Tensor, Tensor]:
        """Magnitudes of rows ``[row_parts, rows]`` and of columns ``[column_parts, columns]``."""
        rows, columns = self.buffer.split([self.rows, self.groups - self.rows], 1)
        return rows[: self.row_parts], columns[: self.column_parts]

    def amax(self) -> tuple[Tensor, Tensor]:
        """amax bits, int32, of rows ``[1, rows]`` and of columns ``[1, columns]``."""
        parts, groups = len(self.buffer), self.groups
        out = torch.empty(groups, dtype=torch.int32, device=self.buffer.device)
        side_by_side = triton.next_power_of_2(groups)
        at_once = min(triton.next_power_of_2(parts), max(MOST_PARTS_AT_ONCE, TILE_ELEMENTS // side_by_side))
        tile = min(TILE_ELEMENTS // at_once, side_by_side)
        run(
            maxima_kernel,
            -(-groups // tile),
            (self.buffer.view(self.dtype), out),
            (groups, self.rows, self.row_parts, self.column_parts),
            {"TILE_P": at_once, "TILE_G": tile},
            num_warps=WARPS,
        )
        rows, columns = out.view(1, groups).split([self.rows, groups - self.rows], 1)
        return rows, columns
