"""Launch the GEMMs: TMA descriptors, configuration, grid. The Triton twin of ``scaled_matmul``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonfp8 import reference, tuning
from tritonfp8.compat import hardware
from tritonfp8.kernels.gemm import block_scaled as block_kernels
from tritonfp8.kernels.gemm import hopper_dense as hopper_kernels
from tritonfp8.kernels.gemm import scaled as matmul_kernels
from tritonfp8.kernels.gemm.sizes import SCALE_VECTOR, SPECIALIZED_WAVE_ROWS
from tritonfp8.launch.executor import planned
from tritonfp8.launch.gemms import widened
from tritonfp8.launch.gemms.operands import (
    SWIZZLE,
    GemmOperands,
    is_readable_along_k,
    plan_reduce,
    programs,
    scale_along_k,
    tile_sizes,
)
from tritonfp8.launch.launcher import served_by
from tritonfp8.launch.plan import TMA_ALIGNMENT, Planner, Pointer, TensorMap, View
from tritonfp8.specs import BLOCK_1X32, BLOCK_1X128, SPECS, empty_scale, spec_of
from tritonfp8.tuning import PARTIAL_BYTES, MatmulConfig

MX_SPECS = frozenset(text for text, spec in SPECS.items() if spec.block == BLOCK_1X32)


def has_tma_layout(x: Tensor) -> bool:
    """Whether TMA can address this matrix: rows contiguous, start and row stride 16-byte aligned."""
    return View.of(x).has_tma_layout()


_KERNELS: dict[str | None, Any] = {
    "epilogue": matmul_kernels.scaled_matmul_kernel,
    "blockwise": block_kernels.block_scaled_matmul_kernel,
    "mx": block_kernels.mx_matmul_kernel,
}


def _plan_tiles(plan: Planner, p: GemmOperands, config: MatmulConfig, count: int, tma: bool, tma_out: bool) -> None:
    """Launch a plain Triton kernel, on any device."""
    m, n, k = p.sizes()
    split = config.split_k > 1
    tma_out = tma_out and not split
    operands: list[Pointer] = [p.a, p.b]
    if tma:
        operands = [TensorMap(x, (rows, config.block_k)) for x, rows in ((p.a, config.block_m), (p.b, config.block_n))]
    columns = config.stored_columns
    out = TensorMap(p.out.strided((m, n), (n, 1)), (config.block_m, columns)) if tma_out else p.out
    constants: dict[str, object]
    a_scale, b_scale = p.scales
    scale_strides = [*a_scale.strides, *b_scale.strides]
    if p.family == "epilogue":
        scale_strides = [*p.row_strides()]
        constants = {"PROMOTE_EVERY": p.promote_every(config)}
    elif p.family == "blockwise":
        constants = {"A_ROWS": p.rows[0], "B_ROWS": p.rows[1], "SCALE_K": BLOCK_1X128[1]}
    else:
        formats = p.formats
        constants = {
            "A_FORMAT": formats[0], "B_FORMAT": formats[1], "SCALE_K": BLOCK_1X32[1],
            "NATIVE": plan.device.has_native_mx,
        }  # fmt: skip
    strides = (*p.a.strides, *p.b.strides, p.out.strides[0], *p.residual_strides(), *scale_strides)
    paths = {"TMA": tma, "TMA_OUT": tma_out, "HALVES": config.halves, "FLATTEN": config.flatten}
    paths |= {"SWAP": config.swap, "SPLIT": split}
    plan.launch(
        _KERNELS[p.family],
        count,
        (*operands, out, *p.pointers(), p.bias, p.residual),
        (m, n, k, *strides, config.split_k),
        {**tile_sizes(config), **constants, **p.epilogue(), **paths},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _plan_specialized(plan: Planner, p: GemmOperands, config: MatmulConfig, count: int) -> None:
    """Launch the warp-specialized kernel; TMA addresses all three matrices."""
    m, n, k = p.sizes()
    split = config.split_k > 1
    a_scale: Pointer
    b_scale: Pointer
    a_scale, b_scale = p.scales
    a_rows, b_rows = p.rows if p.family == "blockwise" else (0, 0)
    if a_rows:
        a_scale, *a_strides = scale_along_k(p.scales[0], a_rows, max(config.block_m, SCALE_VECTOR))
        b_scale, *b_strides = scale_along_k(p.scales[1], b_rows, max(config.block_n, SCALE_VECTOR))
    else:
        a_strides, b_strides = ([stride, 0] for stride in p.row_strides())
    a = (p.a, config.block_m, a_scale, a_strides, a_rows, m)
    b = (p.b, config.block_n, b_scale, b_strides, b_rows, n)
    residual_strides = p.residual_strides()
    out_block = SPECIALIZED_WAVE_ROWS, config.stored_columns
    if config.swap:
        a, b, residual_strides = b, a, residual_strides[::-1]
        out_block = config.block_m, SPECIALIZED_WAVE_ROWS
    (lhs, block_m, a_scale, a_strides, a_rows, m), (rhs, block_n, b_scale, b_strides, b_rows, n) = a, b
    matrices = (
        TensorMap(lhs, (block_m, config.block_k), SWIZZLE),
        TensorMap(rhs, (block_n, config.block_k), SWIZZLE),
        TensorMap(p.out, out_block, SWIZZLE),
    )
    plan.launch(
        hopper_kernels.hopper_matmul_kernel,
        count,
        (*matrices, a_scale, b_scale, p.bias, p.residual),
        (m, n, k, *residual_strides, *a_strides, *b_strides, config.split_k),
        {
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            "BLOCK_K": config.block_k,
            "GROUP_M": config.group_m,
            "A_ROWS": a_rows,
            "B_ROWS": b_rows,
            **p.epilogue(),
            "STAGES": config.num_stages,
            "PROMOTE": p.promotes,
            "SWAP": config.swap,
            "SPLIT": split,
            "STAGGER": config.stagger and not split,
            "TIGHT": config.tight,
            "HALVES": config.halves,
            "OVERLAP": config.overlap,
            "PINGPONG": config.pingpong,
        },
        num_warps=config.num_warps,
    )


def workspace_of(plan: Planner, p: GemmOperands, config: MatmulConfig) -> tuple[View, int]:
    """Memory of the partial sums, in rows that TMA can address, and the number of rows of a part of K.

    Allocated for each launch: under the caching allocator that is safe on every stream and in a CUDA graph.
    """
    m, n, _ = p.sizes()
    rows = -(-m // config.block_m) * config.block_m
    unit = TMA_ALIGNMENT // PARTIAL_BYTES
    return plan.empty((config.split_k * rows, n), torch.float32, (-(-n // unit) * unit, 1)), rows


def _plan_gemm(
    plan: Planner, p: GemmOperands, batch_invariant: bool, config: MatmulConfig | None, tma: bool | None
) -> bool:
    """Whether the GEMM was planned: not if a scale must be copied first."""
    device = plan.device
    m, n, k = p.sizes()
    tma = device.has_tma if tma is None else tma
    tma_operands = tma and p.a.has_tma_layout() and p.b.has_tma_layout()
    tma_out = tma and p.out.has_tma_layout()
    if config is None:
        bare = p.activation is None and p.residual is None
        assert p.family is not None
        config = tuning.choose(
            p.family, p.accumulation, p.rows, m, n, k, p.out.itemsize, bare, tma_operands and tma_out, device,
            batch_invariant,
        )  # fmt: skip
    pieces = -(-m // config.block_m) * -(-n // config.block_n) * config.split_k
    count = programs(plan, config, pieces)
    workspace, rows = workspace_of(plan, p, config) if config.split_k > 1 else (None, 0)
    gemm = p if workspace is None else p.partial_sums(workspace)
    if config.specialized:
        along_k = zip(p.scales, p.rows, strict=True) if p.family == "blockwise" else ()
        if not all(rows > 1 or is_readable_along_k(scale) for scale, rows in along_k):
            return False
        _plan_specialized(plan, gemm, config, count)
    else:
        _plan_tiles(plan, gemm, config, count, tma_operands, tma_out)
    if workspace is not None:
        plan_reduce(plan, p, workspace, rows, config.split_k)
    return True


def plan_scaled_matmul(
    plan: Planner,
    a: View,
    a_scale: View,
    b: View,
    b_scale: View,
    bias: View | None,
    residual: View | None,
    out: View | None,
    a_spec: str,
    b_spec: str,
    activation: str | None,
    out_dtype: torch.dtype | None,
    accumulation: str,
    config: MatmulConfig | None = None,
    tma: bool | None = None,
    batch_invariant: bool = False,
) -> list[View] | None:
    """One output, ``[M, N]``, or none if ``out`` is given. No plan if a bias or a scale must be copied first."""
    outputs = []
    if out is None:
        out = plan.empty((a.shape[0], b.shape[0]), out_dtype or torch.bfloat16)
        outputs.append(out)
    if not out.numel():
        return outputs
    if not (a_scale.within_32_bits() and b_scale.within_32_bits()) or (bias is not None and not bias.is_contiguous()):
        return None
    gemm = GemmOperands(
        a, a_scale, spec_of(a_spec), b, b_scale, spec_of(b_spec), bias, out, accumulation, activation, residual
    )  # fmt: skip
    return outputs if _plan_gemm(plan, gemm, batch_invariant, config, tma) else None


def _within_32_bits(scale: Tensor) -> Tensor:
    return scale if View.of(scale).within_32_bits() else scale.contiguous()


def readable_along_k(scale: Tensor, spec: str) -> Tensor:
    """``scale``, copied if it lies along K and TMA cannot read it: a scale from elsewhere may have any strides."""
    if spec_of(spec).block != BLOCK_1X128 or is_readable_along_k(View.of(scale)):
        return scale
    shape = (scale.shape[0], scale.shape[1] * BLOCK_1X128[1])
    return empty_scale(shape, BLOCK_1X128, "fp32", scale.device).copy_(scale)


@served_by(plan_scaled_matmul, reference.scaled_matmul)
def scaled_matmul(
    a: Tensor,
    a_scale: Tensor,
    a_spec: str,
    b: Tensor,
    b_scale: Tensor,
    b_spec: str,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = torch.bfloat16,
    accumulation: str = "precise",
    batch_invariant: bool = False,
    *,
    config: MatmulConfig | None = None,
    tma: bool | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Launch the twin of :func:`tritonfp8.reference.scaled_matmul`.

    Args:
        batch_invariant: choose a configuration that gives a row the same bits for every M.
        config: use this configuration, not the chosen one. For MX operands that is always a kernel that reads codes.
        tma: use TMA or not, if the layouts allow it; by default what the device has.
        out: write here, ``[M, N]`` contiguous.
    """
    # By a set of texts: this costs each eager call host time.
    if a_spec in MX_SPECS and config is None and _is_widened(a_spec, a.shape[0], a.device, batch_invariant):
        dtype = out_dtype or torch.bfloat16
        return widened.scaled_matmul(a, a_scale, b, b_scale, bias, activation, residual, dtype, out)
    if batch_invariant:
        a = _readable_rows(a)
    tensors = (a, a_scale, b, b_scale, bias, residual, out)
    options = (a_spec, b_spec, activation, out_dtype, accumulation, config, tma, batch_invariant)
    results = planned(plan_scaled_matmul, tensors, options)
    if results is not None:
        return results[0] if out is None else out
    given = (a_scale, b_scale, bias)
    copied = (_within_32_bits(a_scale), _within_32_bits(b_scale), None if bias is None else bias.contiguous())
    if _are_same(copied, given):
        copied = (readable_along_k(a_scale, a_spec), readable_along_k(b_scale, b_spec), bias)
    if _are_same(copied, given):
        raise widened.too_many_scales(a_scale, b_scale)
    a_scale, b_scale, bias = copied
    return scaled_matmul(
        a, a_scale, a_spec, b, b_scale, b_spec, bias, activation, residual, out_dtype, accumulation, batch_invariant,
        config=config, tma=tma, out=out,
    )  # fmt: skip


def _readable_rows(a: Tensor) -> Tensor:
    """``a``, copied if only its layout keeps TMA from reading it: one kernel then serves every batch of its rows."""
    is_odd = a.shape[1] % TMA_ALIGNMENT == 0 and a.numel() > 0 and not has_tma_layout(a)
    return a.clone(memory_format=torch.contiguous_format) if is_odd else a


def _is_widened(a_spec: str, m: int, device: torch.device, batch_invariant: bool) -> bool:
    native = hardware.abilities(device).has_native_mx
    return a_spec in MX_SPECS and tuning.is_widened(m, native, batch_invariant)


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    return all(x is y for x, y in zip(some, others, strict=True))


def product_kind(a_spec: str, device: torch.device, m: int, batch_invariant: bool = False) -> str:
    """How a GEMM of ``m`` rows of operands with this spec runs: a key of :data:`tritonfp8.compat.counting.KINDS`."""
    abilities = hardware.abilities(device)
    if not abilities.has_fp8_mma:
        return "reference"
    if a_spec not in MX_SPECS or abilities.has_native_mx:
        return "fp8"
    return "dequantized" if _is_widened(a_spec, m, device, batch_invariant) else "emulated"
