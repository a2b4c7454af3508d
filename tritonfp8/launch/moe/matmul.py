"""The GEMMs of groups: the Triton twins of ``scaled_grouped_matmul`` and ``grouped_matmul``."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tritonfp8.formats import SCALE_FORMATS
from tritonfp8.kernels.matmul.sizes import SCALE_VECTOR, SPECIALIZED_WAVE_ROWS
from tritonfp8.kernels.moe import hopper as hopper_kernels
from tritonfp8.kernels.moe import matmul as kernels
from tritonfp8.launch.executor import planned
from tritonfp8.launch.matmul import (
    PROMOTION,
    ROW_UNIT,
    SWIZZLE,
    WIDE,
    is_readable_along_k,
    plan_operand,
    readable_along_k,
    scale_along_k,
    too_many_scales,
)
from tritonfp8.launch.moe.schedule import Table, plan_largest_first, plan_row_tiles
from tritonfp8.launch.plan import MAX_OFFSET, Planner, Pointer, TensorMap, View
from tritonfp8.specs import (
    BLOCK_1X32,
    BLOCK_1X128,
    GROUP_ALIGNMENT,
    SCALE_ALIGNMENT,
    QuantSpec,
    matmul_family,
    spec_of,
)
from tritonfp8.tuning import MatmulConfig, choose_grouped, grouped_tiles, is_widened


class _Gemm(NamedTuple):
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
        if self.a_spec is None or self.b_spec is None:
            return None
        return matmul_family(self.a_spec.block, self.b_spec.block)

    @property
    def is_columns(self) -> bool:
        return self.b.ndim == 2

    @property
    def all_tokens(self) -> int:
        return self.tokens if self.is_columns else self.a.shape[0]

    def sizes(self) -> tuple[int, int, int]:
        """M, N and K: rows and columns of ``out`` (of one group, for groups of columns), all columns of ``a``."""
        return self.a.shape[0], self.b.shape[-2], self.a.shape[1]


def _scale_strides(p: _Gemm) -> tuple[int, ...]:
    """Of ``a``: rows and K; of ``b``: groups, rows and K. 0 where one scale serves all rows."""
    if p.a_scale is None or p.b_scale is None:
        return 0, 0, 0, 0, 0
    a, b = p.a_scale, p.b_scale
    # Of tokens that share scales there is one for each group, also if there is one group.
    shared = p.a_spec is not None and p.a_spec.block[0] == -1 and not p.is_columns
    of_a = (a.strides[0] if a.shape[0] > 1 or shared else 0, a.strides[1])
    of_b = (0, *b.strides)[-3:]
    return (*of_a, of_b[0], of_b[1] if b.shape[-2] > 1 else 0, of_b[2])


def _bytes_of(scale: View | None, spec: QuantSpec | None) -> View | None:
    if scale is None or spec is None:
        return None
    return scale.retyped(torch.uint8) if SCALE_FORMATS[spec.scale_format].exponent_only else scale


def _schedule(plan: Planner, p: _Gemm, config: MatmulConfig, step: int = 1) -> tuple[Table, int]:
    """The table by which programs find their tiles, and the most tiles of the output that there can be."""
    m, n, _ = p.sizes()
    tiles_n = -(-n // config.block_n)
    if p.is_columns:
        table = plan_largest_first(plan, p.offsets, p.tokens)
        return table, table.entries * -(-m // config.block_m) * tiles_n
    table = plan_row_tiles(plan, p.offsets, m, config.block_m, aligned=False, step=step)
    return table, table.entries * tiles_n


def _plan_tiles(plan: Planner, p: _Gemm, tile: MatmulConfig) -> None:
    """Launch the plain Triton kernel, on any device."""
    m, n, k = p.sizes()
    family = p.family
    groups = p.offsets.shape[0]
    table, pieces = _schedule(plan, p, tile)
    b_strides = (0, *p.b.strides)[-3:]
    out_strides = p.out.strides if p.is_columns else (0, p.out.strides[0])
    native = family == "mx" and plan.device.has_native_mx
    plan.launch(
        kernels.grouped_matmul_kernel,
        min(pieces, plan.device.num_sms * tile.blocks_per_sm),
        (
            p.a, p.b, p.out, _bytes_of(p.a_scale, p.a_spec), _bytes_of(p.b_scale, p.b_spec), p.bias, table.buffer,
        ),
        (table.entries, groups, m, n, k, *p.a.strides, *b_strides, *out_strides[:2], *_scale_strides(p)),
        {
            "SCALES": family,
            "COLUMNS": p.is_columns,
            "A_ROWS": 0 if p.a_spec is None else p.a_spec.block[0],
            "B_ROWS": 0 if p.b_spec is None else p.b_spec.block[0],
            "SCALE_K": BLOCK_1X32[1] if family == "mx" else BLOCK_1X128[1],
            # None leaves it to the tensor core, which adds up a whole K.
            "PROMOTE_EVERY": min(tile.block_k, PROMOTION) if p.accumulation == "precise" else None,
            "A_FORMAT": None if p.a_spec is None else p.a_spec.format,
            "B_FORMAT": None if p.b_spec is None else p.b_spec.format,
            "NATIVE": native,
            "HAS_BIAS": p.bias is not None,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k,
            "GROUP_M": tile.group_m,
            "ALIGNMENT": GROUP_ALIGNMENT,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip


def _problem(p: _Gemm) -> grouped_tiles.GroupedGemm:
    assert p.family is not None
    assert p.a_spec is not None
    assert p.b_spec is not None
    m, n, k = p.sizes()
    tokens, sizes = (p.tokens, (m, n)) if p.is_columns else (m, (n, k))
    rows = (p.a_spec.block[0], p.b_spec.block[0])
    return grouped_tiles.GroupedGemm(
        p.family, p.accumulation, rows, p.offsets.shape[0], tokens, sizes, p.is_columns, p.out.itemsize
    )


def _matrices(x: View) -> View:
    """Matrices one below the other, as one."""
    return x.strided((math.prod(x.shape[:-1]), x.shape[-1]), x.strides[-2:])


def _has_usual_layout(scale: View | None, spec: QuantSpec | None) -> bool:
    """Whether kernels can address a scale, and TMA can read it where it lies along K."""
    if scale is None or spec is None:
        return True
    along_k = spec.block == BLOCK_1X128 and scale.ndim == 2
    return scale.within_32_bits() and (not along_k or is_readable_along_k(scale))


def _of_usual_layout(scale: Tensor, spec: str) -> Tensor:
    """``scale``, copied if it has another layout: a scale from elsewhere may have any strides."""
    if _has_usual_layout(View.of(scale), spec_of(spec)):
        return scale
    return readable_along_k(scale, spec) if scale.ndim == 2 else scale.contiguous()


def _has_copy_engine(plan: Planner, p: _Gemm) -> bool:
    """Whether TMA can address all that the warp-specialized kernel reads, on a device that has it."""
    if not plan.device.has_tma or p.family not in ("epilogue", "blockwise", None):
        return False
    operands = all(x.has_tma_layout() for x in (p.a, _matrices(p.b), _matrices(p.out))) and p.b.is_contiguous()
    if p.family is None:
        return operands and p.a.itemsize == WIDE.itemsize and (p.is_aligned or not p.is_columns)
    assert p.a_spec is not None
    assert p.b_spec is not None
    assert p.a_scale is not None
    assert p.b_scale is not None
    along_k = [(p.a_scale, p.a_spec.block[0]), (_matrices(p.b_scale), p.b_spec.block[0])]
    readable = p.family == "epilogue" or all(rows > 1 or is_readable_along_k(scale) for scale, rows in along_k)
    return operands and readable


def _scales(p: _Gemm, config: MatmulConfig) -> tuple[list[Pointer | None], tuple[int, ...], tuple[int, int]]:
    """Scales, their strides (groups of a and of b; rows and steps of a, then of b), and the rows that share one."""
    if p.family is None:
        return [None, None], (0, 0, 0, 0, 0, 0), (-1, -1)
    assert p.a_spec is not None
    assert p.b_spec is not None
    assert p.a_scale is not None
    assert p.b_scale is not None
    a_row, a_step, b_group, b_row, b_step = _scale_strides(p)
    if p.family == "epilogue":
        if p.is_columns:
            return [p.a_scale, p.b_scale], (a_step, b_step, a_row, 0, b_row, 0), (0, 0)
        of_a = (0, a_row) if p.a_spec.block[0] == 1 else (a_row, 0)
        return [p.a_scale, p.b_scale], (of_a[0], b_group, of_a[1], 0, b_row, 0), (0, 0)
    a_rows, b_rows = p.a_spec.block[0], p.b_spec.block[0]
    a_scale, *of_a_rows = scale_along_k(p.a_scale, a_rows, max(config.block_m, SCALE_VECTOR))
    b_scale: Pointer = p.b_scale
    of_b_rows = [b_row, b_step]
    if b_rows == 1:
        b_scale, *of_b_rows = scale_along_k(_matrices(p.b_scale), 1, max(config.block_n, SCALE_VECTOR))
    return [a_scale, b_scale], (0, b_group, *of_a_rows, *of_b_rows), (a_rows, b_rows)


def _plan_specialized(plan: Planner, p: _Gemm, config: MatmulConfig) -> None:
    """Launch the warp-specialized kernel."""
    m, n, k = p.sizes()
    groups = p.offsets.shape[0]
    # TMA reads scales along K from multiples of 16 bytes on.
    table, pieces = _schedule(plan, p, config, SCALE_ALIGNMENT if p.family == "blockwise" else 1)
    scales, strides, (a_rows, b_rows) = _scales(p, config)
    out = _matrices(p.out)
    plan.launch(
        hopper_kernels.hopper_grouped_kernel,
        min(pieces, plan.device.num_sms * config.blocks_per_sm),
        (
            TensorMap(p.a, (config.block_m, config.block_k), SWIZZLE),
            TensorMap(_matrices(p.b), (config.block_n, config.block_k), SWIZZLE),
            TensorMap(out, (SPECIALIZED_WAVE_ROWS, config.block_n // (2 if config.halves else 1)), SWIZZLE),
            out, *scales, p.bias, table.buffer,
        ),
        (table.entries, groups, m, n, k, *strides),
        {
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "GROUP_M": config.group_m,
            "A_ROWS": a_rows,
            "B_ROWS": b_rows,
            "COLUMNS": p.is_columns,
            "HAS_BIAS": p.bias is not None,
            "STAGES": config.num_stages,
            "PROMOTE": p.family is not None and (p.accumulation == "precise" or p.family == "blockwise"),
            "STAGGER": config.stagger and not p.is_columns,
            "TIGHT": config.tight,
            "HALVES": config.halves,
            "OVERLAP": config.overlap,
            "ALIGNMENT": GROUP_ALIGNMENT,
        },
        num_warps=config.num_warps,
    )  # fmt: skip


def _chosen(plan: Planner, p: _Gemm) -> MatmulConfig:
    return choose_grouped(_problem(p), plan.device, _has_copy_engine(plan, p))


def _chosen_without_scales(plan: Planner, p: _Gemm) -> MatmulConfig:
    specialized = plan.device.has_warpgroup_mma and _has_copy_engine(plan, p)
    config = _wide(plan, p) if specialized else None
    if config is not None:
        return config
    # The plain kernel would look for these columns where they begin without alignment.
    assert not (p.is_columns and p.is_aligned)
    return grouped_tiles.UNSCALED[p.a.itemsize]


def _wide(plan: Planner, p: _Gemm) -> MatmulConfig | None:
    return grouped_tiles.wide(p.all_tokens, p.offsets.shape[0], p.is_columns, p.out.itemsize, plan.device)


def _is_widened(plan: Planner, p: _Gemm, batch_invariant: bool) -> bool:
    """Whether MX operands are dequantized first: the warp-specialized kernel then multiplies them as bf16.

    The bits would depend on the number of tokens, if a batch-invariant GEMM chose by it.
    """
    if p.family != "mx" or not plan.device.has_warpgroup_mma:
        return False
    assert p.a_scale is not None
    assert p.b_scale is not None
    many = is_widened(p.all_tokens // max(1, p.offsets.shape[0]), plan.device.has_native_mx, batch_invariant)
    readable = p.a.shape[1] % ROW_UNIT == 0 and _matrices(p.out).has_tma_layout() and _wide(plan, p) is not None
    small = max(p.a_scale.numel(), p.b_scale.numel()) < MAX_OFFSET
    return many and readable and small and p.b.is_contiguous() and p.b_scale.is_contiguous()


def _widened(plan: Planner, p: _Gemm) -> _Gemm:
    """The same GEMM, of operands in bf16."""
    assert p.a_scale is not None
    assert p.b_scale is not None
    a = plan_operand(plan, p.a, p.a_scale)
    b = plan_operand(plan, _matrices(p.b), _matrices(p.b_scale))
    b = b.strided(p.b.shape, (p.b.shape[-2] * b.strides[0], *b.strides)[-p.b.ndim :])
    return p._replace(a=a, a_scale=None, a_spec=None, b=b, b_scale=None, b_spec=None)


def _plan(plan: Planner, p: _Gemm, config: MatmulConfig | None = None) -> list[View] | None:
    """One output; None if something must be copied first."""
    if not p.offsets.is_contiguous() or (p.bias is not None and not p.bias.is_contiguous()):
        return None
    if not all(_has_usual_layout(scale, spec) for scale, spec in ((p.a_scale, p.a_spec), (p.b_scale, p.b_spec))):
        return None
    if not p.out.numel():
        return [p.out]
    if config is None:
        config = _chosen_without_scales(plan, p) if p.family is None else _chosen(plan, p)
    if config.specialized:
        _plan_specialized(plan, p, config)
    else:
        _plan_tiles(plan, p, config)
    return [p.out]


def _out(plan: Planner, a: View, b: View, offsets: View, dtype: torch.dtype) -> View:
    shape = (a.shape[0], b.shape[1]) if b.ndim == 3 else (offsets.shape[0], a.shape[0], b.shape[0])
    return plan.empty(shape, dtype)


def plan_scaled_grouped_matmul(
    plan: Planner,
    a: View,
    a_scale: View,
    b: View,
    b_scale: View,
    offsets: View,
    bias: View | None,
    out: View | None,
    a_spec: str,
    b_spec: str,
    out_dtype: torch.dtype | None,
    accumulation: str,
    batch_invariant: bool,
    tokens: int,
    config: MatmulConfig | None = None,
) -> list[View] | None:
    """One output, or none if ``out`` is given. No plan if something must be copied first."""
    result = _out(plan, a, b, offsets, out_dtype or torch.bfloat16) if out is None else out
    gemm = _Gemm(
        a, a_scale, spec_of(a_spec), b, b_scale, spec_of(b_spec), offsets, bias, result, accumulation, tokens
    )  # fmt: skip
    if config is None and result.numel() and offsets.is_contiguous() and _is_widened(plan, gemm, batch_invariant):
        gemm = _widened(plan, gemm)
    outputs = _plan(plan, gemm, config)
    return outputs if outputs is None or out is None else []


def scaled_grouped_matmul(
    a: Tensor,
    a_scale: Tensor,
    a_spec: str,
    b: Tensor,
    b_scale: Tensor,
    b_spec: str,
    offsets: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulation: str = "precise",
    batch_invariant: bool = False,
    tokens: int = 0,
    *,
    config: MatmulConfig | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Launch the twin of :func:`tritonfp8.reference.scaled_grouped_matmul`.

    Args:
        config: use this configuration, not the chosen one.
        out: write here, contiguous.
    """
    tensors = (a, a_scale, b, b_scale, offsets, bias, out)
    options = (a_spec, b_spec, out_dtype, accumulation, batch_invariant, tokens, config)
    results = planned(plan_scaled_grouped_matmul, tensors, options)
    if results is not None:
        return results[0] if out is None else out
    given = (a_scale, b_scale, offsets, bias)
    a_scale, b_scale = _of_usual_layout(a_scale, a_spec), _of_usual_layout(b_scale, b_spec)
    offsets, bias = offsets.contiguous(), None if bias is None else bias.contiguous()
    if all(x is y for x, y in zip(given, (a_scale, b_scale, offsets, bias), strict=True)):
        raise too_many_scales(a_scale, b_scale)
    return scaled_grouped_matmul(
        a, a_scale, a_spec, b, b_scale, b_spec, offsets, bias, *options[2:-1], config=config, out=out
    )  # fmt: skip


def plan_grouped_matmul(plan: Planner, a: View, b: View, offsets: View, bias: View | None) -> list[View] | None:
    """One output, in the dtype of the operands. No plan if something must be copied first."""
    out = _out(plan, a, b, offsets, a.dtype)
    tokens = a.shape[1] if b.ndim == 2 else 0
    return _plan(plan, _Gemm(a, None, None, b, None, None, offsets, bias, out, "precise", tokens, is_aligned=False))


def grouped_matmul(a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    """Launch the twin of :func:`tritonfp8.reference.grouped_matmul`."""
    results = planned(plan_grouped_matmul, (a, b, offsets, bias), ())
    if results is not None:
        return results[0]
    return grouped_matmul(a, b, offsets.contiguous(), None if bias is None else bias.contiguous())
