"""A GEMM, dense or of groups: its operands as the kernels take them, and what their layouts allow."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from tritonfp8.kernels.gemm.scaled import reduce_parts_kernel
from tritonfp8.launch.plan import TMA_ALIGNMENT, Planner, Pointer, TensorMap, View
from tritonfp8.specs import BLOCK_1X128, SCALE_ALIGNMENT, QuantSpec, matmul_family
from tritonfp8.specs.formats import SCALE_FORMATS
from tritonfp8.tuning import REDUCE_TILE, REDUCE_WARPS, MatmulConfig

MAX_TMA_COORDINATE = 2**31 - 1
PROMOTION = 128
SWIZZLE = 128
WIDE = torch.bfloat16


class GemmOperands(NamedTuple):
    """``a [M, K] @ b [N, K].T``; of groups of rows ``b [groups, N, K]``, of groups of columns a product for each.

    Attributes:
        a_scale, a_spec, b_scale, b_spec: None if the operands have no scales.
        bias, activation, residual: the epilogue.
        offsets: the end of each group; None for one GEMM.
        tokens: of groups of columns: how far the offsets may reach.
        is_aligned: groups of columns begin at multiples of GROUP_ALIGNMENT. They always do where there are scales.
    """

    a: View
    a_scale: View | None
    a_spec: QuantSpec | None
    b: View
    b_scale: View | None
    b_spec: QuantSpec | None
    bias: View | None
    out: View
    accumulation: str
    activation: str | None = None
    residual: View | None = None
    offsets: View | None = None
    tokens: int = 0
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
        return self.offsets is not None and self.b.ndim == 2

    @property
    def groups(self) -> int:
        """How many groups there are; 1 for one GEMM."""
        return 1 if self.offsets is None else self.offsets.shape[0]

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of ``a``, and of ``b``, that share a scale; 0 without scales."""
        return (0 if self.a_spec is None else self.a_spec.block[0], 0 if self.b_spec is None else self.b_spec.block[0])

    @property
    def scales(self) -> tuple[View, View]:
        """The scales of operands that have some."""
        assert self.a_scale is not None
        assert self.b_scale is not None
        return self.a_scale, self.b_scale

    @property
    def all_tokens(self) -> int:
        """Tokens of all groups."""
        return self.tokens if self.is_columns else self.a.shape[0]

    def sizes(self) -> tuple[int, int, int]:
        """M, N and K: rows and columns of ``out`` (of one group, for groups of columns), all columns of ``a``."""
        return self.a.shape[0], self.b.shape[-2], self.a.shape[1]

    def pointers(self) -> list[View | None]:
        """Scales as a kernel reads them: exponents of e8m0 as bytes."""
        return [
            scale.retyped(torch.uint8) if scale and spec and SCALE_FORMATS[spec.scale_format].exponent_only else scale
            for scale, spec in ((self.a_scale, self.a_spec), (self.b_scale, self.b_spec))
        ]

    def scale_strides(self) -> tuple[int, ...]:
        """Of ``a``: rows and K; of ``b``: groups, rows and K. 0 where one scale serves all rows."""
        if self.a_scale is None or self.b_scale is None:
            return 0, 0, 0, 0, 0
        a, b = self.a_scale, self.b_scale
        # Of tokens that share scales there is one for each group, also if there is one group.
        shared = self.offsets is not None and self.rows[0] == -1 and not self.is_columns
        of_b = (0, *b.strides)[-3:]
        return (
            a.strides[0] if a.shape[0] > 1 or shared else 0, a.strides[1],
            of_b[0], of_b[1] if b.shape[-2] > 1 else 0, of_b[2],
        )  # fmt: skip

    def row_strides(self) -> tuple[int, int]:
        """Of both scales of one GEMM, from row to row."""
        of_a, _, _, of_b, _ = self.scale_strides()
        return of_a, of_b

    @property
    def formats(self) -> tuple[str | None, str | None]:
        """The formats of the codes; None of values."""
        return None if self.a_spec is None else self.a_spec.format, None if self.b_spec is None else self.b_spec.format

    def epilogue(self) -> dict[str, object]:
        """Compile-time arguments of the epilogue, in the order of the kernels."""
        return {
            "HAS_BIAS": self.bias is not None,
            "ACTIVATION": self.activation,
            "HAS_RESIDUAL": self.residual is not None,
        }

    def residual_strides(self) -> tuple[int, ...]:
        """Rows and columns of the residual."""
        return (0, 0) if self.residual is None else self.residual.strides

    def partial_sums(self, workspace: View) -> GemmOperands:
        """The same GEMM without epilogue, its partial sums into ``workspace``."""
        return self._replace(out=workspace, bias=None, activation=None, residual=None)

    def promote_every(self, config: MatmulConfig) -> int | None:
        """After how much of K the sums are promoted. None leaves them to the tensor core, which adds up a whole K."""
        return min(config.block_k, PROMOTION) if self.accumulation == "precise" else None

    @property
    def promotes(self) -> bool:
        """Whether a warp-specialized kernel promotes."""
        return self.family is not None and (self.accumulation == "precise" or self.family == "blockwise")


def matrices(x: View) -> View:
    """Matrices one below the other, as one."""
    return x.strided((math.prod(x.shape[:-1]), x.shape[-1]), x.strides[-2:])


def tile_sizes(config: MatmulConfig) -> dict[str, object]:
    """The compile-time arguments of a tile, in the order of the kernels."""
    return {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
    }


def programs(plan: Planner, config: MatmulConfig, pieces: int) -> int:
    """As many programs as run at the same time, and no more than there are pieces of work."""
    return min(pieces, plan.device.num_sms * config.blocks_per_sm)


def plan_reduce(plan: Planner, p: GemmOperands, sums: View, rows: int, parts: int) -> None:
    """Add up partial sums in their order, so that every run gives the same bits, and apply the epilogue of ``p``.

    Args:
        plan: takes the launch.
        p: the GEMM. Scales in the epilogue are applied here.
        sums: float32, ``[parts * rows, N]``.
        rows: of each part, at least M.
        parts: how many there are.
    """
    m, n = p.out.shape
    scaled = p.family == "epilogue"
    plan.launch(
        reduce_parts_kernel,
        -(-m // REDUCE_TILE["BLOCK_M"]) * -(-n // REDUCE_TILE["BLOCK_N"]),
        (sums, p.out, *p.pointers(), p.bias, p.residual),
        (
            m, n, rows, sums.strides[0], p.out.strides[0], *p.residual_strides(),
            *(p.row_strides() if scaled else (0, 0)),
        ),
        {**REDUCE_TILE, "SPLIT_K": parts, "SCALED": scaled, **p.epilogue()},
        num_warps=REDUCE_WARPS,
    )  # fmt: skip


def is_readable_along_k(scale: View) -> bool:
    """Whether TMA can read a step's rows of a scale along K, ``[rows, steps]``, as ``Quantized`` lays it out.

    The Hopper kernel finds a step's rows by one 32-bit coordinate.
    """
    row, step = scale.strides
    aligned = scale.aligned and scale.offset % TMA_ALIGNMENT == 0
    return row == 1 and step % SCALE_ALIGNMENT == 0 and aligned and step * scale.shape[1] <= MAX_TMA_COORDINATE


def scale_along_k(scale: View, rows: int, block_rows: int) -> tuple[Pointer, int, int]:
    """A scale along K as the Hopper kernel reads it, with its strides of a row and of a step of K."""
    if rows > 1:
        return scale, scale.strides[0], scale.strides[1]
    step = scale.strides[1]
    size = step * (scale.shape[1] - 1) + scale.shape[0]
    return TensorMap(scale.strided((size,), (1,)), (block_rows,), swizzle=0), 1, step


def has_usual_layout(scale: View | None, spec: QuantSpec | None) -> bool:
    """Whether kernels can address a scale, and TMA can read it where it lies along K."""
    if scale is None or spec is None:
        return True
    along_k = spec.block == BLOCK_1X128 and scale.ndim == 2
    return scale.within_32_bits() and (not along_k or is_readable_along_k(scale))
