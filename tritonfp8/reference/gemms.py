"""GEMMs in plain torch: float32 on dequantized operands, rounded once.

Kernels agree with them within the tolerances of :mod:`tritonfp8.specs.testing`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tritonfp8.reference.casts import dequantize
from tritonfp8.reference.exact import row_products
from tritonfp8.specs import spec_of

_ACTIVATIONS = {"relu": torch.relu, "gelu": F.gelu, "silu": F.silu}


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
) -> Tensor:
    """``activation(a @ b.T + bias) + residual`` on quantized operands, in float32, rounded to ``out_dtype`` at the end.

    Args:
        a: ``[M, K]``, 8-bit, with its scale and the text of its spec.
        b: ``[N, K]``, 8-bit, with its scale and the text of its spec.
        bias: ``[N]`` or None.
        activation: None, ``"relu"``, ``"gelu"`` (by erf) or ``"silu"``.
        residual: ``[M, N]`` or None.
        out_dtype: bfloat16, float16 or float32; None for bfloat16.
        accumulation: no effect here: float32 is the reference for both.
        batch_invariant: compute each row by itself, as a BLAS sums in an order that depends on the number of rows.

    Returns:
        ``[M, N]`` in ``out_dtype``.
    """
    spec_of(a_spec), spec_of(b_spec)
    lhs = dequantize(a, a_scale, a_spec, torch.float32)
    rhs = dequantize(b, b_scale, b_spec, torch.float32)
    with torch.autocast(a.device.type, enabled=False):
        out = _rows_alone(lhs, rhs) if batch_invariant else lhs @ rhs.t()
    if bias is not None:
        out = out + bias.float()
    if activation is not None:
        out = _ACTIVATIONS[activation](out)
    if residual is not None:
        out = out + residual.float()
    return out.to(out_dtype or torch.bfloat16)


def _rows_alone(lhs: Tensor, rhs: Tensor) -> Tensor:
    # Each in memory of its own: how a BLAS sums may depend on the alignment of a row.
    rows = [rhs @ row.clone() for row in lhs]
    return torch.stack(rows) if rows else lhs @ rhs.t()


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, batch_invariant: bool = False) -> Tensor:
    """``a [M, K] @ b [N, K].T + bias [N]`` in the operands' own dtype: a GEMM that a recipe keeps in high precision.

    The call of a plain layer, so that the bias is added before the sum is rounded, to the bits of that layer. With
    ``batch_invariant`` a row of the result has bits of its own, whatever the other rows and their number are.
    """
    if not batch_invariant:
        return F.linear(a, b, bias)
    out = row_products(a, b)
    return (out if bias is None else out + bias.double()).to(a.dtype)
