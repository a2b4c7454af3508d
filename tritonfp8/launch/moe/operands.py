"""A GEMM of groups: its operands as the kernels take them, and what their layouts allow."""

from __future__ import annotations

import math
from typing import NamedTuple

from tritonfp8.kernels.matmul.sizes import SCALE_VECTOR
from tritonfp8.launch.matmul import WIDE, is_readable_along_k, scale_along_k
from tritonfp8.launch.plan import Planner, Pointer, View
from tritonfp8.specs import BLOCK_1X128, QuantSpec, matmul_family
from tritonfp8.tuning import MatmulConfig


class Operands(NamedTuple):
    """Operands of a GEMM of groups as the kernels take them. Scales are None if the operands have none.

    Attributes:
        tokens: of groups of columns: how far the offsets may reach.
        is_aligned: groups of columns begin at multiples of GROUP_ALIGNMENT. They always do where there are scales.
    """

    a: View
    a_scale: View | None
    a_spec: QuantSpec | None
    b: View
    b_scale: View | None
    b_spec: QuantSpec | None
    offsets: View
    bias: View | None
    out: View
    accumulation: str
    tokens: int
    is_aligned: bool = True

    @property
    def family(self) -> str | None:
        """Of the scales; None without scales."""
        if self.a_spec is None or self.b_spec is None:
            return None
        return matmul_family(self.a_spec.block, self.b_spec.block)

    @property
    def is_columns(self) -> bool:
        """Whether the groups are of columns, so that sums run over the tokens of each."""
        return self.b.ndim == 2

    @property
    def specs(self) -> tuple[QuantSpec, QuantSpec]:
        """Of operands that have scales."""
        assert self.a_spec is not None
        assert self.b_spec is not None
        return self.a_spec, self.b_spec

    @property
    def scales(self) -> tuple[View, View]:
        """Of operands that have some."""
        assert self.a_scale is not None
        assert self.b_scale is not None
        return self.a_scale, self.b_scale

    @property
    def all_tokens(self) -> int:
        """Of all groups."""
        return self.tokens if self.is_columns else self.a.shape[0]

    def sizes(self) -> tuple[int, int, int]:
        """M, N and K: rows and columns of ``out`` (of one group, for groups of columns), all columns of ``a``."""
        return self.a.shape[0], self.b.shape[-2], self.a.shape[1]


def matrices(x: View) -> View:
    """Matrices one below the other, as one."""
    return x.strided((math.prod(x.shape[:-1]), x.shape[-1]), x.strides[-2:])


def scale_strides(p: Operands) -> tuple[int, ...]:
    """Of ``a``: rows and K; of ``b``: groups, rows and K. 0 where one scale serves all rows."""
    if p.a_scale is None or p.b_scale is None:
        return 0, 0, 0, 0, 0
    a, b = p.a_scale, p.b_scale
    # Of tokens that share scales there is one for each group, also if there is one group.
    shared = p.a_spec is not None and p.a_spec.block[0] == -1 and not p.is_columns
    of_a = (a.strides[0] if a.shape[0] > 1 or shared else 0, a.strides[1])
    of_b = (0, *b.strides)[-3:]
    return (*of_a, of_b[0], of_b[1] if b.shape[-2] > 1 else 0, of_b[2])


def has_usual_layout(scale: View | None, spec: QuantSpec | None) -> bool:
    """Whether kernels can address a scale, and TMA can read it where it lies along K."""
    if scale is None or spec is None:
        return True
    along_k = spec.block == BLOCK_1X128 and scale.ndim == 2
    return scale.within_32_bits() and (not along_k or is_readable_along_k(scale))


def has_copy_engine(plan: Planner, p: Operands) -> bool:
    """Whether TMA can address all that the warp-specialized kernel reads, on a device that has it."""
    if not plan.device.has_tma or p.family not in ("epilogue", "blockwise", None):
        return False
    if not (all(x.has_tma_layout() for x in (p.a, matrices(p.b), matrices(p.out))) and p.b.is_contiguous()):
        return False
    if p.family is None:
        return p.a.itemsize == WIDE.itemsize and (p.is_aligned or not p.is_columns)
    a_scale, b_scale = p.scales
    along_k = zip((a_scale, matrices(b_scale)), p.specs, strict=True)
    return p.family == "epilogue" or all(spec.block[0] > 1 or is_readable_along_k(scale) for scale, spec in along_k)


def scales_of(p: Operands, config: MatmulConfig) -> tuple[list[Pointer | None], tuple[int, ...], tuple[int, int]]:
    """Scales, their strides (groups of a and of b; rows and steps of a, then of b), and the rows that share one."""
    if p.family is None:
        return [None, None], (0, 0, 0, 0, 0, 0), (-1, -1)
    a_scale, b_scale = p.scales
    a_rows, b_rows = (spec.block[0] for spec in p.specs)
    a_row, a_step, b_group, b_row, b_step = scale_strides(p)
    if p.family == "epilogue":
        if p.is_columns:
            return [a_scale, b_scale], (a_step, b_step, a_row, 0, b_row, 0), (0, 0)
        of_a = (0, a_row) if a_rows == 1 else (a_row, 0)
        return [a_scale, b_scale], (of_a[0], b_group, of_a[1], 0, b_row, 0), (0, 0)
    along_a, *of_a_rows = scale_along_k(a_scale, a_rows, max(config.block_m, SCALE_VECTOR))
    along_b: Pointer = b_scale
    of_b_rows = [b_row, b_step]
    if b_rows == 1:
        along_b, *of_b_rows = scale_along_k(matrices(b_scale), 1, max(config.block_n, SCALE_VECTOR))
    return [along_a, along_b], (0, b_group, *of_a_rows, *of_b_rows), (a_rows, b_rows)
