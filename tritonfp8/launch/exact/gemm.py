"""Launch the GEMM in high precision whose rows have bits of their own; torch's runs the other calls of the op."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tritonfp8 import reference
from tritonfp8.kernels.exact import matmul as kernels
from tritonfp8.launch.launcher import launcher
from tritonfp8.launch.plan import Planner, Pointer, TensorMap, View


class RowsTile(NamedTuple):
    """Sizes of a tile. Every tile adds up K in one order, and has 64 rows or more: fewer use another instruction."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


_NARROW, _WIDE, _FLOAT32 = RowsTile(64, 32, 128, 4, 4), RowsTile(128, 128, 64, 8, 4), RowsTile(64, 64, 32, 8, 2)
_GROUP_M = 8
_ON_KERNELS = (torch.bfloat16, torch.float16, torch.float32)


def _tile(m: int, dtype: torch.dtype) -> RowsTile:
    if dtype == torch.float32:
        return _FLOAT32
    return _NARROW if m <= _NARROW.block_m else _WIDE


def plan_tiles(
    plan: Planner, a: View, b: View, bias: View | None, tile: RowsTile | None = None, tma: bool | None = None
) -> list[View] | None:
    """One output, ``[M, N]``; ``tile`` and ``tma`` replace what would be chosen."""
    (m, k), n = a.shape, b.shape[0]
    if not (m and n and k) or a.dtype != b.dtype or a.dtype not in _ON_KERNELS:
        return None
    if bias is not None and not bias.is_contiguous():
        return None
    tile = tile or _tile(m, a.dtype)
    out = plan.empty((m, n), a.dtype)
    tma = (plan.device.has_tma if tma is None else tma) and a.has_tma_layout() and b.has_tma_layout()
    operands: list[Pointer] = [a, b]
    if tma:
        operands = [TensorMap(x, (rows, tile.block_k)) for x, rows in ((a, tile.block_m), (b, tile.block_n))]
    plan.launch(
        kernels.rows_matmul_kernel,
        -(-m // tile.block_m) * -(-n // tile.block_n),
        (*operands, out, bias),
        (m, n, k, *a.strides, *b.strides, out.strides[0]),
        {
            "HAS_BIAS": bias is not None, "TMA": tma, "PRECISION": "ieee" if a.dtype == torch.float32 else None,
            "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "GROUP_M": _GROUP_M,
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return [out]


def plan_matmul(plan: Planner, a: View, b: View, bias: View | None) -> list[View] | None:
    """One output, ``[M, N]``."""
    return plan_tiles(plan, a, b, bias)


_of_rows = launcher(plan_matmul, reference.matmul)


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, batch_invariant: bool = False) -> Tensor:
    """Launch the twin of :func:`tritonfp8.reference.matmul` if it is ``batch_invariant``, else torch's GEMM."""
    return _of_rows(a, b, bias, True) if batch_invariant else reference.matmul(a, b, bias)
