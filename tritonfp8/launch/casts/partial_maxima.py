"""The amax of blocks that span a whole dim: programs find partial maxima, and a reduce takes the maximum of these.

No atomics, so no memory has to be zero before, and no cast reads more maxima than data.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tritonfp8.kernels.cast.quantize import maxima_kernel
from tritonfp8.launch.plan import Planner, View
from tritonfp8.tuning import cast_tiles

# The partial maxima of the rows and columns of x take one such share of its memory at most.
WORKSPACE_SHARE = 4


def magnitude_dtype(dtype: torch.dtype) -> torch.dtype:
    """The integer dtype of magnitudes: its values have the order of the magnitudes of ``dtype``."""
    return torch.int16 if dtype.itemsize == 2 else torch.int32


def row_chunks(shape: tuple[int, int], tile_rows: int, strips: int, programs: int, lines: int) -> int:
    """Into how many chunks the rows of ``x [m, n]`` are split.

    One for each program of a strip of columns, and no more than there are tiles. Narrow ``x`` get fewer: the partial
    maxima of ``lines`` rows and columns may take a quarter of the memory of ``x``.
    """
    m, n = shape
    fit = m * n // (WORKSPACE_SHARE * max(1, lines))
    return max(1, min(programs // strips, -(-m // tile_rows), fit))


class PartialMaxima(NamedTuple):
    """Maxima of parts of rows and of parts of columns.

    Attributes:
        buffer: ``[parts, rows + columns]``, magnitudes; rows beyond ``row_parts`` or ``column_parts`` are not set.
        rows: how many rows are wanted, all results together; 0 for none.
        row_parts: parts of each row.
        column_parts: parts of each column.
        dtype: of the values that have these magnitudes.
    """

    buffer: View
    rows: int
    row_parts: int
    column_parts: int
    dtype: torch.dtype

    @classmethod
    def allocate(
        cls, plan: Planner, x: View, rows: int, columns: int, row_parts: int, column_parts: int
    ) -> PartialMaxima:
        """Unset, for ``rows`` and ``columns`` (0: not wanted) of values of the dtype of ``x``."""
        parts = max(row_parts if rows else 0, column_parts if columns else 0)
        buffer = plan.empty((parts, rows + columns), magnitude_dtype(x.dtype))
        # float64 is cast by way of float32.
        return cls(buffer, rows, row_parts, column_parts, x.dtype if x.itemsize == 2 else torch.float32)

    @property
    def parts(self) -> int:
        """Partial maxima of a row or of a column, whichever has more."""
        return self.buffer.shape[0]

    @property
    def lines(self) -> int:
        """Rows and columns; also the elements from one part of a line to the next."""
        return self.buffer.shape[1]

    def _split(self, lines: View, row_parts: int, column_parts: int) -> tuple[View, View]:
        """The lines of rows and the lines of columns of ``lines [parts, rows + columns]``."""
        strides = lines.strides
        return (
            lines.strided((row_parts, self.rows), strides),
            lines.strided((column_parts, self.lines - self.rows), strides, self.rows),
        )

    def pointers(self) -> tuple[View, View]:
        """Where the maxima of rows, and the maxima of columns, begin."""
        return self.buffer, self._split(self.buffer, 1, 1)[1] if self.rows < self.lines else self.buffer

    def unreduced(self) -> tuple[View, View]:
        """Magnitudes of rows ``[row_parts, rows]`` and of columns ``[column_parts, columns]``."""
        return self._split(self.buffer, self.row_parts, self.column_parts)

    def reduce(self, plan: Planner, out: View | None = None) -> tuple[View, View]:
        """amax bits, int32, of rows ``[1, rows]`` and of columns ``[1, columns]``; in ``out [1, lines]`` if given."""
        out = plan.empty((1, self.lines), torch.int32) if out is None else out.retyped(torch.int32)
        tile = cast_tiles.reduce_tile(self.parts, self.lines)
        plan.launch(
            maxima_kernel,
            -(-self.lines // tile.n),
            (self.buffer.retyped(self.dtype), out),
            (self.lines, self.rows, self.row_parts, self.column_parts),
            {"TILE_P": tile.m, "TILE_G": tile.n},
            **tile.options(),
        )
        return self._split(out, 1, 1)
