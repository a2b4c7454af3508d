"""Launch the GEMMs whose weight has codes of 4 bits, dense or of groups of tokens: on Hopper they read the codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonfp8 import reference
from tritonfp8.kernels.gemm import hopper_packed as kernels
from tritonfp8.kernels.gemm import hopper_packed_grouped as grouped_kernels
from tritonfp8.kernels.gemm.sizes import SPECIALIZED_WAVE_ROWS
from tritonfp8.launch.casts import add_row_scales, expand_codes, has_words
from tritonfp8.launch.gemms.dense import scaled_matmul, workspace_of
from tritonfp8.launch.gemms.grouped import scaled_grouped_matmul
from tritonfp8.launch.gemms.operands import SWIZZLE, GemmOperands, matrices, plan_reduce, programs
from tritonfp8.launch.group_table import plan_row_tiles
from tritonfp8.launch.launcher import launcher
from tritonfp8.launch.plan import Planner, TensorMap, View
from tritonfp8.specs import EXPANDED, ROWWISE, QuantSpec, spec_of
from tritonfp8.tuning import MatmulConfig, packed_tiles

STEP = 128
# The most registers of a thread at which so many programs of one warp group share a multiprocessor.
_REGISTERS = {2: 128, 4: 64}


def plan_packed_matmul(
    plan: Planner,
    a: View,
    a_scale: View,
    b: View,
    b_scale: View,
    bias: View | None,
    residual: View | None,
    b_row_scale: View | None,
    a_spec: str,
    b_spec: str,
    activation: str | None,
    out_dtype: torch.dtype | None,
    accumulation: str,
    batch_invariant: bool,
    config: MatmulConfig | None = None,
) -> list[View] | None:
    """One output, ``[M, N]``. No plan where the codes should be expanded first."""
    m, n = a.shape[0], b.shape[0]
    bare = activation is None and residual is None
    config = config or packed_tiles.choose_packed(m, n, plan.device.num_sms, bare)
    if not m * n or batch_invariant or config is None:
        return None
    of, of_input = spec_of(b_spec, packed=True), spec_of(a_spec)
    out = plan.empty((m, n), out_dtype or torch.bfloat16)
    if not out.has_tma_layout() or not _is_readable(plan, a, a_scale, of_input, b, b_scale, of, bias):
        return None
    exponents = b_scale.retyped(torch.uint8)
    scales = add_row_scales(plan, b, exponents, of) if b_row_scale is None else b_row_scale
    p = GemmOperands(a, a_scale, of_input, b, scales, EXPANDED, bias, out, accumulation, activation, residual)
    workspace, rows = workspace_of(plan, p, config) if config.split_k > 1 else (None, 0)
    _plan_packed(plan, p if workspace is None else p.partial_sums(workspace), exponents, config)
    if workspace is not None:
        plan_reduce(plan, p, workspace, rows, config.split_k)
    return [out]


def _is_readable(
    plan: Planner, a: View, a_scale: View, a_spec: QuantSpec, b: View, b_scale: View, b_spec: QuantSpec,
    bias: View | None,
) -> bool:  # fmt: skip
    """Whether this device has the kernel, and the kernel reads these layouts."""
    if not (plan.device.has_tma and plan.device.has_warpgroup_mma):
        return False
    is_whole = b_scale.is_contiguous() and b_scale.aligned and b_scale.offset % 4 == 0
    is_plain = a_spec.block == ROWWISE and a_scale.within_32_bits() and (bias is None or bias.is_contiguous())
    return is_whole and is_plain and a.has_tma_layout() and has_words(b, b_spec)


def _registers(config: MatmulConfig) -> dict[str, int]:
    shared = _REGISTERS.get(config.blocks_per_sm)
    return {} if shared is None else {"maxnreg": shared}


def _plan_packed(plan: Planner, p: GemmOperands, exponents: View, config: MatmulConfig) -> None:
    """Launch the kernel, whose rows are the weight's, and whose columns are tokens."""
    m, n, k = p.sizes()
    pieces = -(-m // config.block_m) * -(-n // config.block_n) * config.split_k
    a_scale, b_scale = p.scales
    a_stride, b_stride = p.row_strides()
    plan.launch(
        kernels.hopper_packed_matmul_kernel,
        programs(plan, config, pieces),
        (
            TensorMap(p.b, (config.block_n, config.block_k // 2), SWIZZLE // 2),
            TensorMap(p.a, (config.block_m, config.block_k), SWIZZLE),
            TensorMap(p.out, (min(config.block_m, STEP), SPECIALIZED_WAVE_ROWS), SWIZZLE),
            b_scale, a_scale, exponents, p.bias, p.residual,
        ),
        (n, m, k, *p.residual_strides()[::-1], b_stride, a_stride, config.split_k),
        {
            "BLOCK_M": config.block_n, "BLOCK_N": config.block_m, "BLOCK_K": config.block_k,
            "GROUP_M": config.group_m, **p.epilogue(), "STAGES": config.num_stages, "PROMOTE": p.promotes,
            "SPLIT": config.split_k > 1, "ALIGNED": k % STEP == 0,
        },
        num_warps=config.num_warps,
        **_registers(config),
    )  # fmt: skip


def _expanded(
    a: Tensor, a_scale: Tensor, a_spec: str, b: Tensor, b_scale: Tensor, b_spec: str, *others: Any
) -> Tensor:  # fmt: skip
    *options, b_row_scale = others
    codes, scales = expand_codes(b, b_scale, b_spec, b_row_scale)
    (spec,) = EXPANDED.args
    found: Tensor = scaled_matmul(a, a_scale, a_spec, codes, scales, spec, *options)
    return found


packed_matmul = launcher(plan_packed_matmul, reference.packed_matmul, _expanded)


def plan_packed_grouped_matmul(
    plan: Planner,
    a: View,
    a_scale: View,
    b: View,
    b_scale: View,
    offsets: View,
    bias: View | None,
    b_row_scale: View | None,
    a_spec: str,
    b_spec: str,
    out_dtype: torch.dtype | None,
    accumulation: str,
    batch_invariant: bool,
) -> list[View] | None:
    """One output, ``[tokens, N]``. No plan where the codes should be expanded first.

    Every group sums K in one order, so ``batch_invariant`` changes nothing.
    """
    (groups, n, _), tokens = b.shape, a.shape[0]
    config = packed_tiles.choose_packed_groups(tokens, groups)
    if not tokens * groups * n or config is None or not offsets.is_contiguous():
        return None
    of, out = spec_of(b_spec, packed=True), plan.empty((tokens, n), out_dtype or torch.bfloat16)
    q = matrices(b) if b.is_contiguous() else None
    if q is None or not _is_readable(plan, a, a_scale, spec_of(a_spec), q, b_scale, of, bias):
        return None
    exponents = b_scale.retyped(torch.uint8)
    known = None if b_row_scale is None or not b_row_scale.is_contiguous() else b_row_scale
    scales = add_row_scales(plan, q, matrices(exponents), of) if known is None else known
    table = plan_row_tiles(plan, offsets, tokens, config.block_m, aligned=False)
    k = a.shape[1]
    plan.launch(
        grouped_kernels.hopper_packed_grouped_kernel,
        programs(plan, config, table.entries * -(-n // config.block_n)),
        (
            TensorMap(q, (config.block_n, config.block_k // 2), SWIZZLE // 2),
            TensorMap(a, (config.block_m, config.block_k), SWIZZLE),
            out, scales, a_scale, exponents, bias, table.buffer,
        ),
        (table.entries, groups, n, tokens, k, 1, a_scale.strides[0]),
        {
            "BLOCK_M": config.block_n, "BLOCK_N": config.block_m, "BLOCK_K": config.block_k,
            "HAS_BIAS": bias is not None, "STAGES": config.num_stages,
            "PROMOTE": accumulation == "precise", "ALIGNED": k % STEP == 0,
        },
        num_warps=config.num_warps,
        **_registers(config),
    )  # fmt: skip
    return [out]


def _expanded_groups(
    a: Tensor, a_scale: Tensor, a_spec: str, b: Tensor, b_scale: Tensor, b_spec: str, offsets: Tensor, *others: Any
) -> Tensor:  # fmt: skip
    *options, b_row_scale = others
    # Of experts that have tokens: few, where few tokens are decoded.
    codes, scales = expand_codes(b, b_scale, b_spec, b_row_scale, offsets)
    (spec,) = EXPANDED.args
    return scaled_grouped_matmul(a, a_scale, a_spec, codes, scales, spec, offsets, *options)


packed_grouped_matmul = launcher(plan_packed_grouped_matmul, reference.packed_grouped_matmul, _expanded_groups)
