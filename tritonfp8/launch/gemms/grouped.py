"""The GEMMs of groups: the Triton twins of ``scaled_grouped_matmul`` and ``grouped_matmul``."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonfp8 import reference
from tritonfp8.compat import hardware
from tritonfp8.compat.hardware import Abilities
from tritonfp8.kernels.gemm import grouped as kernels
from tritonfp8.kernels.gemm import hopper_grouped as hopper_kernels
from tritonfp8.kernels.gemm.sizes import SCALE_VECTOR, SPECIALIZED_WAVE_ROWS
from tritonfp8.launch.executor import planned
from tritonfp8.launch.gemms.by_torch import can_sum, sum_tokens
from tritonfp8.launch.gemms.dense import product_kind, readable_along_k
from tritonfp8.launch.gemms.operands import (
    SWIZZLE,
    WIDE,
    GemmOperands,
    has_usual_layout,
    is_readable_along_k,
    matrices,
    programs,
    scale_along_k,
    tile_sizes,
)
from tritonfp8.launch.gemms.widened import ROW_UNIT, plan_operand, too_many_scales
from tritonfp8.launch.group_table import Table, plan_largest_first, plan_row_tiles
from tritonfp8.launch.launcher import served_by
from tritonfp8.launch.plan import MAX_OFFSET, Planner, Pointer, TensorMap, View
from tritonfp8.specs import (
    BLOCK_1X32,
    BLOCK_1X128,
    GROUP_ALIGNMENT,
    SCALE_ALIGNMENT,
    spec_of,
)
from tritonfp8.tuning import MatmulConfig, choose_grouped, grouped_tiles, is_widened


def _schedule(plan: Planner, p: GemmOperands, config: MatmulConfig, step: int = 1) -> tuple[Table, int]:
    """The table by which programs find their tiles, and the most tiles of the output that there can be."""
    m, n, _ = p.sizes()
    tiles_n = -(-n // config.block_n)
    assert p.offsets is not None
    if p.is_columns:
        table = plan_largest_first(plan, p.offsets, p.tokens)
        return table, table.entries * -(-m // config.block_m) * tiles_n
    table = plan_row_tiles(plan, p.offsets, m, config.block_m, aligned=False, step=step)
    return table, table.entries * tiles_n


def _plan_tiles(plan: Planner, p: GemmOperands, tile: MatmulConfig) -> None:
    """Launch the plain Triton kernel, on any device."""
    m, n, k = p.sizes()
    table, pieces = _schedule(plan, p, tile)
    b_strides = (0, *p.b.strides)[-3:]
    out_strides = p.out.strides if p.is_columns else (0, p.out.strides[0])
    plan.launch(
        kernels.grouped_matmul_kernel,
        programs(plan, tile, pieces),
        (p.a, p.b, p.out, *p.pointers(), p.bias, table.buffer),
        (table.entries, p.groups, m, n, k, *p.a.strides, *b_strides, *out_strides[:2], *p.scale_strides()),
        {
            "SCALES": p.family,
            "COLUMNS": p.is_columns,
            "A_ROWS": p.rows[0],
            "B_ROWS": p.rows[1],
            "SCALE_K": BLOCK_1X32[1] if p.family == "mx" else BLOCK_1X128[1],
            "PROMOTE_EVERY": p.promote_every(tile),
            "A_FORMAT": p.formats[0],
            "B_FORMAT": p.formats[1],
            "NATIVE": p.family == "mx" and plan.device.has_native_mx,
            "HAS_BIAS": p.bias is not None,
            **tile_sizes(tile),
            "ALIGNMENT": GROUP_ALIGNMENT,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip


def _has_copy_engine(plan: Planner, p: GemmOperands) -> bool:
    """Whether TMA can address all that the warp-specialized kernel reads, on a device that has it."""
    if not plan.device.has_tma or p.family not in ("epilogue", "blockwise", None):
        return False
    if not (all(x.has_tma_layout() for x in (p.a, matrices(p.b), matrices(p.out))) and p.b.is_contiguous()):
        return False
    if p.family is None:
        return p.a.itemsize == WIDE.itemsize and (p.is_aligned or not p.is_columns)
    a_scale, b_scale = p.scales
    along_k = zip((a_scale, matrices(b_scale)), p.rows, strict=True)
    return p.family == "epilogue" or all(rows > 1 or is_readable_along_k(scale) for scale, rows in along_k)


def _scales_of(p: GemmOperands, config: MatmulConfig) -> tuple[list[Pointer | None], tuple[int, ...], tuple[int, int]]:
    """Scales, their strides (groups of a and of b; rows and steps of a, then of b), and the rows that share one."""
    if p.family is None:
        return [None, None], (0, 0, 0, 0, 0, 0), (-1, -1)
    a_scale, b_scale = p.scales
    a_rows, b_rows = p.rows
    a_row, a_step, b_group, b_row, b_step = p.scale_strides()
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


def _of_usual_layout(scale: Tensor, spec: str) -> Tensor:
    """``scale``, copied if it has another layout: a scale from elsewhere may have any strides."""
    if has_usual_layout(View.of(scale), spec_of(spec)):
        return scale
    return readable_along_k(scale, spec) if scale.ndim == 2 else scale.contiguous()


def _plan_specialized(plan: Planner, p: GemmOperands, config: MatmulConfig) -> None:
    """Launch the warp-specialized kernel."""
    m, n, k = p.sizes()
    # TMA reads scales along K from multiples of 16 bytes on.
    table, pieces = _schedule(plan, p, config, SCALE_ALIGNMENT if p.family == "blockwise" else 1)
    scales, strides, (a_rows, b_rows) = _scales_of(p, config)
    out = matrices(p.out)
    plan.launch(
        hopper_kernels.hopper_grouped_kernel,
        programs(plan, config, pieces),
        (
            TensorMap(p.a, (config.block_m, config.block_k), SWIZZLE),
            TensorMap(matrices(p.b), (config.block_n, config.block_k), SWIZZLE),
            TensorMap(out, (SPECIALIZED_WAVE_ROWS, config.stored_columns), SWIZZLE),
            out, *scales, p.bias, table.buffer,
        ),
        (table.entries, p.groups, m, n, k, *strides),
        {
            **tile_sizes(config),
            "A_ROWS": a_rows,
            "B_ROWS": b_rows,
            "COLUMNS": p.is_columns,
            "HAS_BIAS": p.bias is not None,
            "STAGES": config.num_stages,
            "PROMOTE": p.promotes,
            "STAGGER": config.stagger and not p.is_columns,
            "TIGHT": config.tight,
            "SIDE_BY_SIDE": config.side_by_side,
            "HALVES": config.halves,
            "OVERLAP": config.overlap,
            "ALIGNMENT": GROUP_ALIGNMENT,
        },
        num_warps=config.num_warps,
    )  # fmt: skip


def _chosen(plan: Planner, p: GemmOperands) -> MatmulConfig:
    device, is_readable = plan.device, _has_copy_engine(plan, p)
    if p.family is not None:
        m, n, k = p.sizes()
        sizes = (m, n) if p.is_columns else (n, k)
        gemm = grouped_tiles.GroupedGemm(
            p.family, p.accumulation, p.rows, p.groups, p.all_tokens, sizes, p.is_columns, p.out.itemsize
        )
        return choose_grouped(gemm, device, is_readable)
    config = _wide(device, p) if device.has_warpgroup_mma and is_readable else None
    if config is not None:
        return config
    # The plain kernel would look for these columns where they begin without alignment.
    assert not (p.is_columns and p.is_aligned)
    return grouped_tiles.UNSCALED[p.a.itemsize]


def _wide(device: Abilities, p: GemmOperands) -> MatmulConfig | None:
    return grouped_tiles.wide(p.all_tokens, p.groups, p.is_columns, p.out.itemsize, device)


def _is_widened(device: Abilities, p: GemmOperands, batch_invariant: bool) -> bool:
    """Whether MX operands are dequantized first: the warp-specialized kernel then multiplies them as bf16.

    The bits would depend on the number of tokens, if a batch-invariant GEMM chose by it.
    """
    if p.family != "mx" or not device.has_warpgroup_mma or not p.out.numel():
        return False
    a_scale, b_scale = p.scales
    many = is_widened(p.all_tokens // max(1, p.groups), device.has_native_mx, batch_invariant)
    readable = p.a.shape[1] % ROW_UNIT == 0 and matrices(p.out).has_tma_layout() and _wide(device, p) is not None
    small = max(a_scale.numel(), b_scale.numel()) < MAX_OFFSET
    return many and readable and small and p.b.is_contiguous() and b_scale.is_contiguous()


def _widened(plan: Planner, p: GemmOperands) -> GemmOperands:
    """The same GEMM, of operands in bf16."""
    a, b = (plan_operand(plan, matrices(x), matrices(y)) for x, y in zip((p.a, p.b), p.scales, strict=True))
    b = b.strided(p.b.shape, (p.b.shape[-2] * b.strides[0], *b.strides)[-p.b.ndim :])
    return p._replace(a=a, a_scale=None, a_spec=None, b=b, b_scale=None, b_spec=None)


def _plan(plan: Planner, p: GemmOperands, config: MatmulConfig | None = None) -> list[View] | None:
    """One output; None if something must be copied first."""
    if any(x is not None and not x.is_contiguous() for x in (p.offsets, p.bias)):
        return None
    if not all(has_usual_layout(scale, spec) for scale, spec in ((p.a_scale, p.a_spec), (p.b_scale, p.b_spec))):
        return None
    if not p.out.numel():
        return [p.out]
    config = config or _chosen(plan, p)
    (_plan_specialized if config.specialized else _plan_tiles)(plan, p, config)
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
    gemm = GemmOperands(
        a, a_scale, spec_of(a_spec), b, b_scale, spec_of(b_spec), bias, result, accumulation, offsets=offsets,
        tokens=tokens,
    )  # fmt: skip
    if config is None and _is_widened(plan.device, gemm, batch_invariant):
        gemm = _widened(plan, gemm)
    outputs = _plan(plan, gemm, config)
    return outputs if outputs is None or out is None else []


@served_by(plan_scaled_grouped_matmul, reference.scaled_grouped_matmul)
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


def grouped_product_kind(
    a: Tensor, a_scale: Tensor, a_spec: str, b: Tensor, b_scale: Tensor, b_spec: str, offsets: Tensor,
    bias: Tensor | None = None, out_dtype: torch.dtype | None = None, accumulation: str = "precise",
    batch_invariant: bool = False, tokens: int = 0,
) -> str:  # fmt: skip
    """How a GEMM of groups runs: a key of :data:`tritonfp8.compat.counting.KINDS`."""
    # As in batch-invariant GEMMs, kernels read the codes of every operand, except of MX operands that are widened.
    kind = product_kind(a_spec, a.device, len(a), True)
    shape = (len(a), b.shape[1]) if b.ndim == 3 else (len(offsets), len(a), len(b))
    out = torch.empty(shape, dtype=out_dtype or torch.bfloat16, device="meta")
    views = (View.of(x) for x in (a, a_scale, b, b_scale, offsets, out))
    of_a, of_a_scale, of_b, of_b_scale, of_offsets, of_out = views
    gemm = GemmOperands(
        of_a, of_a_scale, spec_of(a_spec), of_b, of_b_scale, spec_of(b_spec), None, of_out, accumulation,
        offsets=of_offsets, tokens=tokens,
    )  # fmt: skip
    is_widened = _is_widened(hardware.abilities(a.device), gemm, batch_invariant)
    return "dequantized" if kind == "emulated" and is_widened else kind


def plan_grouped_matmul(plan: Planner, a: View, b: View, offsets: View, bias: View | None) -> list[View] | None:
    """One output, in the dtype of the operands. No plan if something must be copied first."""
    out = _out(plan, a, b, offsets, a.dtype)
    tokens = a.shape[1] if b.ndim == 2 else 0
    gemm = GemmOperands(
        a, None, None, b, None, None, bias, out, "precise", offsets=offsets, tokens=tokens, is_aligned=False
    )
    return _plan(plan, gemm)


def grouped_matmul(a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    """Launch the twin of :func:`tritonfp8.reference.grouped_matmul`."""
    if b.ndim == 2 and can_sum(a, b):
        return sum_tokens(a, b, offsets)
    results = planned(plan_grouped_matmul, (a, b, offsets, bias), ())
    if results is not None:
        return results[0]
    return grouped_matmul(a, b, offsets.contiguous(), None if bias is None else bias.contiguous())
