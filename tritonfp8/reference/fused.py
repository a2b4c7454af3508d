"""Producers fused with quantization (RMSNorm, SwiGLU) in plain torch, with the signatures of the ops.

A producer computes in float32 and rounds once to the dtype of its input (RMSNorm also twice, by ``rounding``). The
rounded tensor is quantized by :func:`tritonfp8.reference.quantize`. The kernels do the same, with two differences:

    rms_norm    rstd differs by a few units in its last place, because the order of a float32 sum differs. Given the
                kernel's rstd, its result equals this one to the bit.
    silu_mul    the sigmoid uses exp2 and rsqrt of the hardware. Its relative error is 2^-19 for |gate| < 8 and grows
                in proportion to |gate|: at most one unit in the last place of a 16-bit dtype. Where terms cancel, as
                in grad_gate at the minimum of SiLU, it is one unit of the terms. Given the kernel's rounded result,
                its quantization equals this one to the bit. Where exp(-gate) overflows (gate < -88), the sigmoid is 0.

Formulas, all in float32, with ``rstd = 1 / sqrt(mean(x^2) + eps)`` for each row:

    rms_norm            y = round(x * rstd * weight)                      rounding "output": torch.nn.RMSNorm
                        y = round(round(x * rstd) * weight)               rounding "normalized": transformers' Llama
    rms_norm_backward   n = x * rstd; g = grad * weight
                        grad_x = round((g - n * mean(g * n)) * rstd [+ residual])
                        grad_weight = sum over rows of grad * n           n rounded as in the forward pass
    silu_mul            h = round(gate * sigmoid(gate) * up)
    its backward        grad_gate = round(grad * up * (sigmoid * (1 + gate * (1 - sigmoid))))
                        grad_up = round(grad * (gate * sigmoid))

Zhang, Sennrich: "Root Mean Square Layer Normalization" (arXiv 1910.07467); Shazeer: "GLU Variants Improve Transformer"
(arXiv 2002.05202).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tritonfp8.formats import FORMATS, SCALE_FORMATS, stacked
from tritonfp8.reference.casts import quantize
from tritonfp8.specs import ORIENTATIONS, SCALE_ALIGNMENT, QuantSpec, empty_scale, spec_of


def _normalized(x: Tensor, rstd: Tensor, rounding: str) -> Tensor:
    normalized = x.float() * rstd.unsqueeze(1)
    return normalized.to(x.dtype).float() if rounding == "normalized" else normalized


def rms_norm(x: Tensor, weight: Tensor, eps: float, rounding: str) -> tuple[Tensor, Tensor]:
    """RMSNorm of each row, not quantized.

    Args:
        x: ``[M, K]``, bfloat16, float16 or float32.
        weight: ``[K]``, floating.
        eps: added to the mean square.
        rounding: a member of :data:`~tritonfp8.specs.RMS_NORM_ROUNDINGS`.

    Returns:
        ``(y [M, K] in the dtype of x, rstd [M] float32)``.
    """
    # Summed in float64: the rounded mean is the nearest float32 value for any order of summation.
    mean = x.double().square().mean(1).float()
    rstd = 1.0 / torch.sqrt(mean + eps)
    return (_normalized(x, rstd, rounding) * weight.float()).to(x.dtype).contiguous(), rstd


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    rounding: str,
    spec: str,
    spec_t: str,
    orientation: str,
    keep: bool,
) -> list[Tensor]:
    """RMSNorm of each row, quantized untransposed, transposed, or both.

    Args:
        x: ``[M, K]``, bfloat16, float16 or float32.
        weight: ``[K]``, floating.
        eps: added to the mean square.
        rounding: a member of :data:`~tritonfp8.specs.RMS_NORM_ROUNDINGS`.
        spec: the text of the spec of the untransposed result.
        spec_t: the text of the spec of the transposed result, in the coordinates of ``y.T``.
        orientation: a key of :data:`~tritonfp8.specs.ORIENTATIONS`.
        keep: also return the unquantized ``y``.

    Returns:
        One list: ``qdata [M, K], scale`` if untransposed; ``qdata_t [K, M], scale_t`` if transposed; ``rstd [M]``
        float32; ``y [M, K]`` in the dtype of ``x`` if ``keep``.
    """
    y, rstd = rms_norm(x, weight, eps, rounding)
    return [*_quantized(y, spec, spec_t, orientation), rstd, *([y] if keep else [])]


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, rounding: str, residual: Tensor | None, needs_weight: bool
) -> list[Tensor]:
    """Gradients of RMSNorm.

    Args:
        grad: gradient of the result, ``[M, K]``.
        x: ``[M, K]``.
        weight: ``[K]``.
        rstd: ``[M]`` float32, from the forward pass.
        rounding: as in the forward pass.
        residual: ``[M, K]``, the gradient of a residual connection around the norm, added to that of ``x``; or None.
        needs_weight: also return the gradient of ``weight``.

    Returns:
        ``[grad_x [M, K] in the dtype of x]``, and ``grad_weight [K]`` in the dtype of ``weight`` if ``needs_weight``.
    """
    normalized = x.float() * rstd.unsqueeze(1)
    weighted = grad.float() * weight.float()
    mean = (weighted * normalized).double().mean(1, keepdim=True).float()
    grad_x = (weighted - normalized * mean) * rstd.unsqueeze(1)
    if residual is not None:
        grad_x = grad_x + residual.float()
    if not needs_weight:
        return [grad_x.to(x.dtype).contiguous()]
    grad_weight = (grad.float() * _normalized(x, rstd, rounding)).double().sum(0)
    return [grad_x.to(x.dtype).contiguous(), grad_weight.float().to(weight.dtype)]


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up`` in float32, rounded once to the dtype of ``gate``."""
    value = gate.float()
    return (value * _sigmoid(value) * up.float()).to(gate.dtype).contiguous()


def _sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-x))


def silu_mul_quantize(
    gate: Tensor,
    up: Tensor,
    spec: str,
    spec_t: str,
    orientation: str,
    keep: bool,
) -> list[Tensor]:
    """``silu(gate) * up``, quantized untransposed, transposed, or both.

    Args:
        gate, up: ``[M, F]``, bfloat16, float16 or float32, of any strides, such as halves of one ``[M, 2 F]`` tensor.
        spec: the text of the spec of the untransposed result.
        spec_t: the text of the spec of the transposed result, in its coordinates.
        orientation: a key of :data:`~tritonfp8.specs.ORIENTATIONS`.
        keep: also return the unquantized result.

    Returns:
        One list: ``qdata [M, F], scale`` if untransposed; ``qdata_t [F, M], scale_t`` if transposed; the result
        ``[M, F]`` in the dtype of ``gate`` if ``keep``.
    """
    h = silu_mul(gate, up)
    return [*_quantized(h, spec, spec_t, orientation), *([h] if keep else [])]


def silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``silu(gate) * up`` with respect to ``gate`` and ``up``, rounded to the dtype of ``gate``."""
    g, value = grad.float(), gate.float()
    sigmoid = _sigmoid(value)
    grad_gate = g * up.float() * (sigmoid * (1.0 + value * (1.0 - sigmoid)))
    return grad_gate.to(gate.dtype), (g * (value * sigmoid)).to(gate.dtype)


def silu_mul_backward_quantize(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    spec: str,
    spec_t: str,
    orientation: str,
    keep: bool,
) -> list[Tensor]:
    """Gradients of :func:`silu_mul_quantize`, quantized for the GEMMs that read them.

    Args:
        grad: gradient of ``silu(gate) * up``, ``[M, F]``.
        gate, up: ``[M, F]``, in the dtype of ``grad``.
        spec, spec_t, ...: as in :func:`silu_mul_quantize`; one pair of specs for both gradients.

    Returns:
        As :func:`silu_mul_quantize`, each tensor with one more leading dim: index 0 is the gradient of ``gate``, index
        1 that of ``up``. Each has its own scales: ``qdata[i], scale[i]`` is one quantized tensor.
    """
    grads = silu_mul_backward(grad, gate, up)
    pairs = [_quantized(g, spec, spec_t, orientation) for g in grads]
    specs = [spec_of(s) for s, wanted in zip((spec, spec_t), ORIENTATIONS[orientation], strict=True) if wanted]
    out = []
    for i, s in enumerate(specs):
        qdata = stacked([pair[2 * i] for pair in pairs])
        scales = empty_scales(len(pairs), qdata.shape[1:], s.block, s.scale_format, qdata.device)
        for scale, pair in zip(scales, pairs, strict=True):
            scale.copy_(pair[2 * i + 1])
        out += [qdata, scales]
    return [*out, *([torch.stack(grads)] if keep else [])]


def _quantized(y: Tensor, spec: str, spec_t: str, orientation: str) -> list[Tensor]:
    normal, transposed = ORIENTATIONS[orientation]
    return [*(quantize(y, spec) if normal else ()), *(quantize(y, spec_t, True) if transposed else ())]


def empty_scales(
    count: int, shape: Sequence[int], block: Sequence[int], scale_format: str, device: torch.device
) -> Tensor:
    """Uninitialized scales of ``count`` tensors of ``shape``, stacked; each aligned, in its block's physical order."""
    one = empty_scale(shape, block, scale_format, torch.device("meta"))
    extent = sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True)) + 1
    span = -(-max(extent, 1) // SCALE_ALIGNMENT) * SCALE_ALIGNMENT
    return torch.empty_strided(
        (count, *one.shape), (span, *one.stride()), dtype=SCALE_FORMATS[scale_format].dtype, device=device
    )


def empty_results(
    count: int,
    shape: Sequence[int],
    spec: QuantSpec,
    spec_t: QuantSpec,
    orientation: str,
    device: torch.device,
) -> list[Tensor]:
    """Uninitialized results of a producer of ``shape``, with a leading dim of size ``count``, or without it if 0."""
    out: list[Tensor] = []
    for s, sizes, wanted in zip(
        (spec, spec_t), (tuple(shape), tuple(shape)[::-1]), ORIENTATIONS[orientation], strict=True
    ):
        if wanted:
            lead = (count,) if count else ()
            out.append(torch.empty((*lead, *sizes), dtype=FORMATS[s.format].dtype, device=device))
            scales = empty_scales(count, sizes, s.block, s.scale_format, device) if count else None
            out.append(empty_scale(sizes, s.block, s.scale_format, device) if scales is None else scales)
    return out
