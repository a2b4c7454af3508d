"""One result of a cast: codes and scales of one orientation, of one matrix or of groups."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tritonfp8.kernels.cast import quantize as kernels
from tritonfp8.launch.plan import View, kernel_constants
from tritonfp8.specs import QuantSpec, transposed
from tritonfp8.specs.formats import SCALE_FORMATS
from tritonfp8.tuning import BlockShape, cast_tiles

META = torch.device("meta")


class Side(NamedTuple):
    """One result, in the coordinates of what is cast. Strides are of rows, columns and groups.

    Attributes:
        qdata, q_strides: the codes.
        scale, scale_strides, scale_sizes: the scales, and how many rows and columns of them a group has.
        block, spec: of the scales.
        amax, amax_strides: bits or magnitudes of the amaxes; None if the kernel finds them. Of one matrix they may be
            the maxima of several parts, and the last stride leads from part to part.
        parts: how many parts there are.
        given: whether the amaxes are a caller's.
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
    parts: int = 0
    given: bool = False

    def with_parts(self, amax: View, given: bool = False) -> Side:
        """With amaxes ``[parts, groups_m, groups_n]``."""
        part, row, col = amax.strides
        return self._replace(amax=amax, amax_strides=(row, col, part), parts=amax.shape[0], given=given)

    def pointers(self) -> list[View]:
        """The pointers of codes, scales and amaxes."""
        exponent_only = SCALE_FORMATS[self.spec.scale_format].exponent_only
        scale = self.scale.retyped(torch.uint8) if exponent_only else self.scale
        return [self.qdata, scale, scale if self.amax is None else self.amax]

    @property
    def step_parts(self) -> int:
        """How many partial maxima of the amax the kernel reduces in one step; 0 if it finds the amax itself.

        The kernel's mark of an amax that a caller gave.
        """
        if self.given:
            return int(kernels.GIVEN.value)
        return 0 if self.amax is None else cast_tiles.step_parts(self.parts)

    def swapped(self) -> Side:
        """The same result in the coordinates of the transpose of each matrix."""
        (q_row, q_col, q_group), (row, col, group) = self.q_strides, self.scale_strides
        amax_row, amax_col, amax_group = self.amax_strides
        return self._replace(
            q_strides=(q_col, q_row, q_group),
            scale_strides=(col, row, group),
            scale_sizes=self.scale_sizes[::-1],
            amax_strides=(amax_col, amax_row, amax_group),
            block=transposed(self.block),
        )


def both(side: Side | None, side_t: Side | None) -> tuple[Side, Side]:
    """Two sides; one that is missing is the other one."""
    first, second = side or side_t, side_t or side
    assert first is not None
    assert second is not None
    return first, second


def side_constants(side: Side | None, side_t: Side | None) -> dict[str, object]:
    """The compile-time arguments with which kernels of casts begin; a missing side gets the arguments of the other."""
    first, second = both(side, side_t)
    return {
        **kernel_constants(first.spec, first.block),
        "PARTS": first.step_parts,
        **kernel_constants(second.spec, second.block, "_T"),
        "PARTS_T": second.step_parts,
        "NORMAL": side is not None,
        "TRANSPOSED": side_t is not None,
    }
