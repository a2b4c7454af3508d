"""Norms, logsumexp and gates whose rows have bits of their own.

The layout of a tile in registers, and with it the order of a sum, depends on dtype and alignment. So sums are of
integers, which are equal in every order.
"""

import triton
import triton.language as tl

from tritonfp8.kernels.gemm.tiles import activate
from tritonfp8.kernels.numerics import INFINITY_BITS, LOG2_E, larger_or_nan, magnitude_bits, reduce_max
from tritonfp8.kernels.pdl import begin

LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
SQRT_2_PI: tl.constexpr = tl.constexpr(0.7978845608028654)
SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)
CUBIC: tl.constexpr = tl.constexpr(0.044715)
FIXED_POINT: tl.constexpr = tl.constexpr(2.0**40)
FROM_FIXED_POINT: tl.constexpr = tl.constexpr(2.0**-40)


@triton.jit
def finite_base(largest):
    """A maximum to subtract from exponents; 0 for a maximum of -inf, as -inf minus itself is NaN."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def fixed_sum(x):
    """The sum of up to 2^18 numbers from 0 to 16, in steps of 2^-40: equal in every order."""
    return tl.sum((x * FIXED_POINT).to(tl.int64), 0).to(tl.float32) * FROM_FIXED_POINT


@triton.jit
def _mean_of_squares(x, N):
    """Of a float32 row with zeros behind its N elements, scaled by a power of two near the largest."""
    largest = tl.max(magnitude_bits(x), 0)
    exponent = tl.minimum(tl.maximum(largest >> 23, 1), 253)
    unit = (exponent << 23).to(tl.float32, bitcast=True)
    scaled = x * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    mean = tl.div_rn(fixed_sum(scaled * scaled), tl.full((), N, tl.float32)) * unit * unit
    # NaN or infinity in a row.
    return tl.where(largest < INFINITY_BITS, mean, largest.to(tl.float32, bitcast=True))


@triton.jit
def rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, rstd_ptr, N, stride_x, EPS: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``out [rows, N]`` and ``rstd [rows]``; see ``tritonfp8.reference.rms_norm``. One row a program."""
    begin(DEPENDENT)
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    x = tl.load(x_ptr + row.to(tl.int64) * stride_x + cols, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    wide = x.to(tl.float32)
    rstd = tl.div_rn(tl.full((), 1.0, tl.float32), tl.sqrt_rn(_mean_of_squares(wide, N) + EPS))
    normalized = wide * rstd
    out = normalized * (weight + 1.0) if UNIT_OFFSET else normalized.to(x.dtype).to(tl.float32) * weight
    tl.store(out_ptr + row.to(tl.int64) * N + cols, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def rms_norm_backward_kernel(
    grad_ptr, x_ptr, weight_ptr, rstd_ptr, out_ptr, parts_ptr, rows, N, stride_grad, stride_x,
    UNIT_OFFSET: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``out``, the gradient of ``x``; and ``parts [programs, N]``, the gradient of the weight by a program's rows."""
    begin(DEPENDENT)
    cols = tl.arange(0, BLOCK)
    mask = cols < N
    factor = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        factor += 1.0
    of_weight = tl.zeros((BLOCK,), tl.float32)
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.zeros((), tl.int32) + i
        x = tl.load(x_ptr + row.to(tl.int64) * stride_x + cols, mask=mask, other=0.0)
        grad = tl.load(grad_ptr + row.to(tl.int64) * stride_grad + cols, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normalized = x.to(tl.float32) * rstd
        rounded = normalized if UNIT_OFFSET else normalized.to(x.dtype).to(tl.float32)
        of_weight += grad * rounded
        of_normalized = grad * factor
        dot = tl.sum(of_normalized * normalized, 0) / N
        out = (of_normalized - normalized * dot) * rstd
        tl.store(out_ptr + row.to(tl.int64) * N + cols, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(parts_ptr + tl.program_id(0).to(tl.int64) * N + cols, of_weight, mask=mask)


@triton.jit
def sum_parts_kernel(parts_ptr, out_ptr, parts, N, TILE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """``out [N]``: the sum of ``parts [parts, N]``, in order; each program sums BLOCK columns."""
    begin(DEPENDENT)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, parts, TILE):
        rows = start + tl.arange(0, TILE)
        mask = (rows < parts)[:, None] & (cols < N)[None, :]
        total += tl.sum(tl.load(parts_ptr + rows[:, None] * N + cols[None, :], mask=mask, other=0.0), 0)
    tl.store(out_ptr + cols, total.to(out_ptr.dtype.element_ty), mask=cols < N)


@triton.jit
def row_logsumexp_kernel(
    x_ptr, out_ptr, N, stride_x, TEMPERATURE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):
    """``out [rows]``: the logsumexp of ``x [rows, N] / TEMPERATURE``. One row a program, in blocks in order."""
    begin(DEPENDENT)
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, N, BLOCK):
        x = tl.load(x_ptr + row.to(tl.int64) * stride_x + start + cols, mask=start + cols < N, other=float("-inf")).to(
            tl.float32
        )
        if TEMPERATURE != 1.0:
            x = tl.div_rn(x, tl.full((BLOCK,), TEMPERATURE, tl.float32))
        raised = larger_or_nan(largest, reduce_max(x, 0))
        base = finite_base(raised)
        added = fixed_sum(tl.exp2((x - base) * LOG2_E))
        total = tl.fma(total, tl.exp2((largest - base) * LOG2_E), added)
        largest = raised
    # A row of -inf has a total of 0, of which log2 is -inf.
    found = tl.fma(tl.log2(total), LN_2, finite_base(largest))
    tl.store(out_ptr + row, tl.where(largest < float("inf"), found, float("nan")))


@triton.jit
def _bend(x):
    """``tanh``'s argument in the approximation of gelu, times two."""
    return (x + x * x * x * CUBIC) * (2.0 * SQRT_2_PI)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    # 0.5 * (1 + tanh(y)) is the sigmoid of 2 y.
    return x / (1.0 + tl.exp(-_bend(x))) if ACTIVATION == "gelu_tanh" else activate(x, ACTIVATION)


@triton.jit
def _slope(x, ACTIVATION: tl.constexpr):
    """The derivative of an activation."""
    if ACTIVATION == "silu":
        sigmoid = 1.0 / (1.0 + tl.exp(-x))
        return sigmoid * (1.0 + x * (1.0 - sigmoid))
    elif ACTIVATION == "gelu":
        density = tl.exp(-0.5 * x * x) * (SQRT_2_PI * 0.5)
        return 0.5 * (1.0 + tl.erf(x * SQRT_HALF)) + x * density
    elif ACTIVATION == "gelu_tanh":
        sigmoid = 1.0 / (1.0 + tl.exp(-_bend(x)))
        inner = (1.0 + x * x * (3.0 * CUBIC)) * (2.0 * SQRT_2_PI)
        return sigmoid + x * (sigmoid * (1.0 - sigmoid)) * inner
    else:
        return tl.where(x > 0.0, 1.0, tl.where(x <= 0.0, 0.0, x))


@triton.jit
def gated_kernel(
    gate_ptr, up_ptr, out_ptr, N, stride_gate, stride_up,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``out = activation(gate) * up`` of ``[rows, N]``, the activation rounded to the dtype of ``gate``."""
    begin(DEPENDENT)
    tiles = tl.cdiv(N, BLOCK)
    row = tl.program_id(0) // tiles
    col = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    mask = col < N
    gate = tl.load(gate_ptr + row.to(tl.int64) * stride_gate + col, mask=mask, other=0.0)
    up = tl.load(up_ptr + row.to(tl.int64) * stride_up + col, mask=mask, other=0.0).to(tl.float32)
    rounded = _activated(gate.to(tl.float32), ACTIVATION).to(gate.dtype).to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64) * N + col, (rounded * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gated_backward_kernel(
    grad_ptr, gate_ptr, up_ptr, out_gate_ptr, out_up_ptr, N, stride_grad, stride_gate, stride_up,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The gradients of ``gate`` and ``up``, ``[rows, N]``."""
    begin(DEPENDENT)
    tiles = tl.cdiv(N, BLOCK)
    row = tl.program_id(0) // tiles
    col = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    mask = col < N
    grad = tl.load(grad_ptr + row.to(tl.int64) * stride_grad + col, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row.to(tl.int64) * stride_gate + col, mask=mask, other=0.0)
    up = tl.load(up_ptr + row.to(tl.int64) * stride_up + col, mask=mask, other=0.0).to(tl.float32)
    x = gate.to(tl.float32)
    rounded = _activated(x, ACTIVATION).to(gate.dtype).to(tl.float32)
    of_activated = (grad * up).to(gate.dtype).to(tl.float32)
    tl.store(
        out_gate_ptr + row.to(tl.int64) * N + col, (of_activated * _slope(x, ACTIVATION)).to(gate.dtype), mask=mask
    )
    tl.store(out_up_ptr + row.to(tl.int64) * N + col, (grad * rounded).to(gate.dtype), mask=mask)
