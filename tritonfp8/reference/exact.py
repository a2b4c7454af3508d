"""Ops whose bits depend only on the row (the token) that they compute, in plain torch; their products and sums.

A BLAS, and torch's sums over a dim, add in an order that depends on the shapes of all operands. Here a sum has one
order of elementwise additions, and a GEMM has sums without a rounding error, which are equal in every order. torch
computes sigmoid, silu, gelu and exp2 by other instructions for the last elements of a tensor; exp, erf and tanh it does
not, so that activations are written with these.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tritonfp8.specs import checks

# float64 has integers up to 2^53 without a gap.
_INTEGER_BITS = 53
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
_SQRT_HALF, _SQRT_2_PI, _CUBIC = math.sqrt(0.5), math.sqrt(2 / math.pi), 0.044715


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def row_units(x: Tensor) -> Tensor:
    """A power of two above the magnitudes of each row of ``x [..., K]``, ``[..., 1]`` float64; 1 for a row of zeros."""
    largest = x.double().abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros((*x.shape[:-1], 1)).double()
    # The quotient is a power of two, so the division is exact.
    return torch.where(largest == 0, 1.0, largest / torch.frexp(largest).mantissa)


def unit_products(a: Tensor, b: Tensor) -> Tensor:
    """``a [..., M, K] @ b [..., N, K].mT`` of magnitudes up to 1, float64, with bits that no order of sums changes.

    An operand is the sum of two integers of so few bits that float64 has every sum of their products. Three GEMMs of
    these integers are exact, and the sum of their results is elementwise.
    """
    bits = (_INTEGER_BITS - max(1, a.shape[-1]).bit_length()) // 2
    (a_high, a_low), (b_high, b_low) = _integers(a, bits), _integers(b.mT, bits)
    out = a_low @ b_high + a_high @ b_low
    return ((a_high @ b_high) + out * 2.0**-bits) * 2.0 ** (-2 * bits)


def _integers(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    scaled = x.double() * 2.0**bits
    high = scaled.round()
    return high, ((scaled - high) * 2.0**bits).round()


def row_products(a: Tensor, b: Tensor) -> Tensor:
    """``a [..., M, K] @ b [..., N, K].mT`` in float64; an element depends on its row of ``a`` and of ``b`` only."""
    a_unit, b_unit = row_units(a), row_units(b)
    return unit_products(a.double() / a_unit, b.double() / b_unit) * a_unit * b_unit.mT


def ordered_sum(x: Tensor) -> Tensor:
    """The sum along the last dim, which stays with size 1: halves are added elementwise, in one order."""
    while (n := x.shape[-1]) > 1:
        half = (n + 1) // 2
        added = x[..., : n - half] + x[..., half:]
        x = added if n % 2 == 0 else torch.cat((added, x[..., n - half : half]), -1)
    return x if x.shape[-1] else x.new_zeros((*x.shape[:-1], 1))


def rms_norm(x: Tensor, weight: Tensor, eps: float, unit_offset: bool = False) -> tuple[Tensor, Tensor]:
    """RMS normalization of the last dim (Zhang and Sennrich 2019), with the roundings of transformers' models.

    Args:
        x: ``[..., N]``.
        weight: ``[N]``.
        eps: is added to the mean of squares.
        unit_offset: multiply by ``1 + weight`` in float32 and round once, as Gemma does. Otherwise the normalized row
            is rounded before it is multiplied by ``weight``, as Llama does.

    Returns:
        The result, contiguous, in the dtype of ``x`` (without ``unit_offset`` in the common dtype of both); and
        ``1 / sqrt(mean(x^2) + eps)`` of each row, ``[rows]`` float32 (float64 for float64).
    """
    check_norm(x.shape, weight.shape)
    widened = x.to(wide(x.dtype))
    mean = ordered_sum(widened * widened) / max(1, x.shape[-1])
    rstd = 1.0 / (mean + eps).sqrt()
    if unit_offset:
        out = (widened * rstd * (1.0 + weight.to(rstd.dtype))).to(x.dtype)
    else:
        out = (widened * rstd).to(x.dtype) * weight
    return out.contiguous(), rstd.reshape(-1)


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """The gradients of ``x``, contiguous, and of ``weight`` from the gradient of the result of :func:`rms_norm`."""
    dtype, n = rstd.dtype, x.shape[-1]
    rows, scale = x.reshape(-1, n).to(dtype), rstd[:, None]
    grads = grad.reshape(-1, n).to(dtype)
    normalized = rows * scale
    factor = weight.to(dtype) + 1.0 if unit_offset else weight.to(dtype)
    of_normalized = grads * factor
    dot = (of_normalized * normalized).sum(-1, keepdim=True) / max(1, n)
    grad_x = (of_normalized - normalized * dot) * scale
    grad_weight = (grads * (normalized if unit_offset else normalized.to(x.dtype).to(dtype))).sum(0)
    return grad_x.to(x.dtype).view(x.shape), grad_weight.to(weight.dtype)


def check_norm(x: tuple[int, ...], weight: tuple[int, ...]) -> None:
    """Check the shapes of :func:`rms_norm`.

    Raises:
        ValueError: ``weight`` is no vector of the last dim of ``x``.
    """
    if not x or tuple(weight) != tuple(x[-1:]):
        raise ValueError(
            f"rms_norm needs a weight of one number for each element of a row of x; got x of shape {tuple(x)} and "
            f"weight of shape {tuple(weight)}"
        )


def row_logsumexp(x: Tensor, temperature: float = 1.0) -> Tensor:
    """``log(sum(exp(x / temperature)))`` of each row of ``x [..., N]``, ``[...]`` float32 (float64 for float64)."""
    check_temperature(temperature)
    scaled = x.to(wide(x.dtype)) / temperature
    if not x.shape[-1]:
        return scaled.new_full(x.shape[:-1], -math.inf)
    largest = scaled.amax(-1, keepdim=True)
    # A row of -inf only: exp(-inf - 0) is 0, exp(-inf + inf) would be NaN.
    base = torch.where(largest == -math.inf, 0.0, largest)
    return (ordered_sum((scaled - base).exp()).log() + base).squeeze(-1)


def check_temperature(temperature: float) -> None:
    """Raise ValueError unless ``temperature`` is positive."""
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0; got {temperature}. Take the largest logit for greedy decoding")


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up``; the activation is rounded to the dtype before the product, as layers of torch do.

    Args:
        gate: any shape.
        up: the shape and dtype of ``gate``.
        activation: one of :data:`ACTIVATIONS`; ``"gelu"`` is by erf.

    Returns:
        Contiguous, in the dtype of both.
    """
    check_gated(gate, up, activation)
    return gated_values(gate, up, activation)


def gated_values(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """:func:`gated` of arguments that were checked."""
    return (_activated(gate.to(wide(gate.dtype)), activation).to(gate.dtype) * up).contiguous()


def _activated(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return x / (1.0 + (-x).exp())
    if activation == "gelu":
        return 0.5 * x * (1.0 + (x * _SQRT_HALF).erf())
    if activation == "gelu_tanh":
        return 0.5 * x * (1.0 + (_SQRT_2_PI * (x + _CUBIC * (x * x * x))).tanh())
    return torch.where(x < 0.0, 0.0, x)


def _slope(x: Tensor, activation: str) -> Tensor:
    """The derivative of an activation."""
    if activation == "silu":
        sigmoid = 1.0 / (1.0 + (-x).exp())
        return sigmoid * (1.0 + x * (1.0 - sigmoid))
    if activation == "gelu":
        density = (-0.5 * x * x).exp() * (_SQRT_2_PI * 0.5)
        return 0.5 * (1.0 + (x * _SQRT_HALF).erf()) + x * density
    if activation == "gelu_tanh":
        tanh = (_SQRT_2_PI * (x + _CUBIC * (x * x * x))).tanh()
        inner = _SQRT_2_PI * (1.0 + 3.0 * _CUBIC * (x * x))
        return 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner
    return torch.where(x > 0.0, 1.0, torch.where(x <= 0.0, 0.0, x))


def gated_backward(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The gradients of ``gate`` and ``up``, contiguous, from the gradient of :func:`gated`."""
    check_gated(gate, up, activation)
    dtype = wide(gate.dtype)
    x, grads = gate.to(dtype), grad.to(dtype)
    rounded = _activated(x, activation).to(gate.dtype).to(dtype)
    grad_gate = (grads * up.to(dtype)).to(gate.dtype).to(dtype) * _slope(x, activation)
    return grad_gate.to(gate.dtype).contiguous(), (grads * rounded).to(up.dtype).contiguous()


def check_gated(gate: Any, up: Any, activation: str) -> None:
    """Check the arguments of :func:`gated`, tensors or views.

    Raises:
        ValueError: an unknown activation; or ``gate`` and ``up`` differ in shape or dtype.
    """
    checks.require("activation", activation, ACTIVATIONS)
    if tuple(gate.shape) != tuple(up.shape) or gate.dtype != up.dtype:
        raise ValueError(
            f"gate and up need one shape and dtype; got {tuple(gate.shape)} {gate.dtype} and {tuple(up.shape)} "
            f"{up.dtype}"
        )


def rotary_tables(positions: Tensor, inv_freq: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions (Su et al. 2021), float32 ``[B, T, 2 F]``: each frequency stands twice.

    Args:
        positions: ``[B, T]`` integers.
        inv_freq: ``[F]``, radians a position.
        scaling: factor of both tables.
    """
    angles = positions[..., None].float() * inv_freq.float()
    angles = torch.cat((angles, angles), -1)
    return angles.cos() * scaling, angles.sin() * scaling
