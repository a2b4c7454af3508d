"""Sums over the tokens of each group in bf16, by torch's grouped GEMM.

A recipe that keeps ``grad_weight`` in high precision leaves this GEMM to torch, like the GEMMs of linear layers.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from tritonfp8.compat import hardware
from tritonfp8.launch.plan import TMA_ALIGNMENT, View


def can_sum(a: Tensor, b: Tensor) -> bool:
    """Whether torch has a kernel for ``a [M, tokens]`` and ``b [N, tokens]``; elsewhere it loops over the groups.

    It has one for bf16 on Hopper, and reads both as transposed matrices by TMA. It pads the rows of the result to
    multiples of 16 bytes, so only such an N has the usual strides.
    """
    return (
        a.dtype == torch.bfloat16
        and hardware.abilities(a.device).has_warpgroup_mma
        and all(View.of(x).t().has_tma_layout() for x in (a, b))
        and len(b) * b.itemsize % TMA_ALIGNMENT == 0
    )


def sum_tokens(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """``a[:, start:end] @ b[:, start:end].T`` of each group, ``[groups, M, N]``, as the reference's ``grouped_matmul``.

    Torch's kernel trusts the offsets, so wrong ones are replaced, as in our kernels: an end before the previous end
    counts as the previous end, one beyond the tokens as the number of tokens.
    """
    ends = offsets.clamp(0, a.shape[1]).cummax(0).values
    return F.grouped_mm(a, b.t(), offs=ends)
