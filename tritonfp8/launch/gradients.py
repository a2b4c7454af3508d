"""Launch the casts and sums of parts of gradients: see :mod:`tritonfp8.kernels.optim.gradients`."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonfp8 import reference
from tritonfp8.kernels.optim import gradients as kernels
from tritonfp8.launch.kernel_cache import run
from tritonfp8.launch.plan import kernel_constants
from tritonfp8.specs.formats import FORMATS

# Groups of 128 elements of a program. A thread casts eight elements, which share a random state; of each part it
# adds four, so that all parts fit its registers.
CAST_ROWS, SUM_ROWS, WARPS = 16, 8, 8
# Parts of one launch: a program has all of them in registers. A power of two, so that the sums of launches are nodes of
# the tree.
MOST_PARTS = 32
# A factor and a sum must not become one operation that rounds once.
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}
_COLS = reference.PART.block[1]


def quantize_parts(x: Tensor, parts: int, rank: int) -> Tensor:
    """See :func:`tritonfp8.reference.quantize_parts`."""
    reference.check_parts(x, parts)
    n = x.numel() // parts
    groups, size = reference.part_sizes(n)
    out = torch.empty(parts, size, dtype=torch.uint8, device=x.device)
    used = groups * (_COLS + 1)
    if used < size:
        out[:, used:].zero_()
    if n:
        constants = kernel_constants(reference.PART, reference.PART.block)
        pointers = x.contiguous(), out, out.view(-1)[groups * _COLS :]
        run(
            kernels.quantize_parts_kernel, parts * -(-groups // CAST_ROWS), pointers, (n, groups, size, rank),
            {**{name: constants[name] for name in ("QMAX", "MANTISSA_BITS", "EMIN")}, "ROWS": CAST_ROWS}, **OPTIONS,
        )  # fmt: skip
    return out


def sum_in_pairs(out: Tensor, parts: Tensor, factor: float) -> None:
    """See :func:`tritonfp8.reference.sum_in_pairs`."""
    reference.check_sum(out, parts)
    n, count, quantized = out.numel(), parts.shape[0], parts.dtype == torch.uint8
    groups, size = reference.part_sizes(n)
    if not n or not out.is_contiguous():
        reference.sum_in_pairs(out, parts, factor)
        return
    if count > MOST_PARTS:
        nodes = torch.empty(-(-count // MOST_PARTS), n, device=out.device)
        for node, some in zip(nodes, parts.split(MOST_PARTS), strict=True):
            sum_in_pairs(node, some, 1.0)
        sum_in_pairs(out, nodes, factor)
        return
    parts = parts.contiguous()
    exponents = parts.view(-1)[groups * _COLS :] if quantized else None
    values = parts.view(FORMATS[reference.PART.format].dtype) if quantized else parts
    integers = n, groups, parts.shape[1], size
    constants = {"PARTS": count, "FACTOR": factor, "ROWS": SUM_ROWS}
    run(kernels.sum_in_pairs_kernel, -(-groups // SUM_ROWS), (values, exponents, out), integers, constants, **OPTIONS)
