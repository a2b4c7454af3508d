"""RMSNorm of whole rows: forward, with quantization of the result, and backward.

The tile kernel of ``swiglu.py`` writes the transposed result. It computes each element by the same operations.
"""

import triton
import triton.language as tl

from tritonfp8.kernels.fused.swiglu import normalized_rows, offsets, quantize_rows, tile_cols, tile_rows
from tritonfp8.kernels.numerics import magnitudes, reduce_max
from tritonfp8.kernels.pdl import begin
from tritonfp8.kernels.triton_names import DISABLE_LICM, DISABLE_LICM_OF_ROWS_OF_4096

NO_POLICY: tl.constexpr = tl.constexpr("")


@triton.jit
def _load(ptr, rows, cols, M, N, stride_m, stride_n, EVICTION: tl.constexpr = NO_POLICY):
    return tl.load(
        ptr + offsets(rows, cols, stride_m, stride_n),
        mask=(rows < M) & (cols < N),
        other=0.0,
        eviction_policy=EVICTION,
    )


@triton.jit
def _row_sum(x):
    """Sum of each row: ``[1, T, H, C]`` -> ``[1, T, 1, 1]``."""
    return tl.sum(tl.sum(x, 3, keep_dims=True), 2, keep_dims=True)


@triton.jit
def _row_mean(x, N):
    total = _row_sum(x)
    return tl.div_rn(total, tl.zeros(total.shape, tl.float32) + N)


@triton.jit
def rms_norm_rows_kernel(
    x_ptr, weight_ptr, rstd_ptr, y_ptr, q_ptr, s_ptr, columns_ptr, tensor_ptr,
    M, N, stride_xm, stride_xn, stride_w, stride_sm, stride_sn,
    COLS: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr, E8M0: tl.constexpr, POW2: tl.constexpr,
    EPS: tl.constexpr, ROUND_NORMALIZED: tl.constexpr, NORMAL: tl.constexpr, KEEP: tl.constexpr,
    COLUMN_AMAX: tl.constexpr, TENSOR_AMAX: tl.constexpr, DIRECT_CAST: tl.constexpr, PREFETCH: tl.constexpr,
    HOLD_WEIGHT: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """RMSNorm of whole rows: rstd, with NORMAL the rows quantized in blocks of 1 x COLS, and partial maxima.

    A program walks over rows, so it writes one partial maximum for each column, ``columns [programs, N]``, and one in
    all, ``tensor [programs]``; both are magnitudes. ``rstd [M]``, ``q`` and ``y [M, N]`` are contiguous.
    """
    begin(DEPENDENT)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    BLOCK_N: tl.constexpr = COLS if NORMAL and COLS > 0 else TILE_N
    H: tl.constexpr = TILE_N // BLOCK_N
    cols = tile_cols(0, H, BLOCK_N)
    step = tl.num_programs(0) * TILE_M
    first = tl.program_id(0) * TILE_M
    # Zeros of the dtype of the magnitudes.
    found = tl.zeros((1, 1, H, BLOCK_N), magnitudes(tl.zeros((1,), DTYPE)).dtype)
    WRITES: tl.constexpr = NORMAL or KEEP or COLUMN_AMAX or TENSOR_AMAX
    if WRITES and HOLD_WEIGHT:
        weight = tl.load(weight_ptr + cols * stride_w, mask=cols < N, other=0.0)
    if PREFETCH:
        x = _load(x_ptr, tile_rows(first, 1, TILE_M, 1), cols, M, N, stride_xm, stride_xn)
    KEEP_IN_LOOP: tl.constexpr = DISABLE_LICM or (DISABLE_LICM_OF_ROWS_OF_4096 and TILE_N == 4096)
    for start in tl.range(first, M, step, disable_licm=KEEP_IN_LOOP):
        rows = tile_rows(start, 1, TILE_M, 1)
        if PREFETCH:
            following = _load(x_ptr, rows + step, cols, M, N, stride_xm, stride_xn)
        else:
            x = _load(x_ptr, rows, cols, M, N, stride_xm, stride_xn)
        value = x.to(tl.float32)
        variance = _row_mean(value * value, N) + EPS
        rstd = tl.div_rn(tl.full(variance.shape, 1.0, tl.float32), tl.sqrt_rn(variance))
        tl.store(rstd_ptr + rows, rstd, mask=rows < M)
        if WRITES:
            if not HOLD_WEIGHT:
                weight = tl.load(weight_ptr + cols * stride_w, mask=cols < N, other=0.0)
            y = (normalized_rows(x, rstd, ROUND_NORMALIZED) * weight.to(tl.float32)).to(DTYPE)
            if KEEP:
                tl.store(y_ptr + offsets(rows, cols, N, 1), y.to(y_ptr.dtype.element_ty), mask=(rows < M) & (cols < N))
            if COLUMN_AMAX or TENSOR_AMAX:
                values = magnitudes(y)
                # Rows beyond M: their rstd may be infinite, and zeros times it are NaN.
                values = tl.where(rows < M, values, 0).to(values.dtype)
                found = tl.maximum(found, reduce_max(values, 1, True))
            if NORMAL:
                quantize_rows(
                    y, tl.zeros((1, 1, 1, 1), tl.float32), rows, cols, 0, q_ptr, s_ptr, s_ptr, M, N,
                    stride_sm, stride_sn, 1, COLS, QMAX, EMAX, QMAX_MANTISSA, MANTISSA_BITS, EMIN, E8M0, POW2,
                    False, DIRECT_CAST,
                )  # fmt: skip
        if PREFETCH:
            x = following
    if COLUMN_AMAX:
        tl.store(columns_ptr + offsets(tl.program_id(0), cols, N, 1), found, mask=cols < N)
    if TENSOR_AMAX:
        inside = tl.reshape(tl.where(cols < N, found, 0).to(found.dtype), (TILE_N,))
        tl.store(tensor_ptr + tl.program_id(0), reduce_max(inside, 0))


@triton.jit
def rms_norm_backward_kernel(
    grad_ptr, x_ptr, weight_ptr, rstd_ptr, residual_ptr, out_ptr, partial_ptr,
    M, N, stride_gm, stride_gn, stride_xm, stride_xn, stride_w, stride_rm, stride_rn,
    ROUND_NORMALIZED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GRAD_WEIGHT: tl.constexpr, PREFETCH: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Gradient of x, ``out [M, N]`` contiguous, and partial sums of the gradient of weight, ``partial [programs, N]``.

    Programs walk over rows in a fixed order, so the sums are the same bits on every run.
    """
    begin(DEPENDENT)
    # Wide rows take too many registers, so they are loaded twice, from the cache. Another eviction policy stops the
    # compiler from merging the two loads.
    RELOAD: tl.constexpr = TILE_N > 8192
    cols = tile_cols(0, 1, TILE_N)
    step = tl.num_programs(0) * TILE_M
    first = tl.program_id(0) * TILE_M
    total = tl.zeros((1, 1, 1, TILE_N), tl.float32)
    if PREFETCH:
        grad = _load(grad_ptr, tile_rows(first, 1, TILE_M, 1), cols, M, N, stride_gm, stride_gn)
        x = _load(x_ptr, tile_rows(first, 1, TILE_M, 1), cols, M, N, stride_xm, stride_xn)
    for start in range(first, M, step):
        rows = tile_rows(start, 1, TILE_M, 1)
        if PREFETCH:
            next_grad = _load(grad_ptr, rows + step, cols, M, N, stride_gm, stride_gn)
            next_x = _load(x_ptr, rows + step, cols, M, N, stride_xm, stride_xn)
        else:
            grad = _load(grad_ptr, rows, cols, M, N, stride_gm, stride_gn)
            x = _load(x_ptr, rows, cols, M, N, stride_xm, stride_xn)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        weight = tl.load(weight_ptr + cols * stride_w, mask=cols < N, other=0.0).to(tl.float32)
        normalized = x.to(tl.float32) * rstd
        weighted = grad.to(tl.float32) * weight
        mean = _row_mean(weighted * normalized, N)
        if RELOAD:
            grad = _load(grad_ptr, rows, cols, M, N, stride_gm, stride_gn, "evict_first")
            x = _load(x_ptr, rows, cols, M, N, stride_xm, stride_xn, "evict_first")
            weight = tl.load(weight_ptr + cols * stride_w, mask=cols < N, other=0.0, eviction_policy="evict_last").to(
                tl.float32
            )
            normalized = x.to(tl.float32) * rstd
            weighted = grad.to(tl.float32) * weight
        if GRAD_WEIGHT:
            share = grad.to(tl.float32) * normalized_rows(x, rstd, ROUND_NORMALIZED)
            total += tl.sum(share, 1, keep_dims=True)
        out = (weighted - normalized * mean) * rstd
        if HAS_RESIDUAL:
            out += _load(residual_ptr, rows, cols, M, N, stride_rm, stride_rn).to(tl.float32)
        tl.store(out_ptr + offsets(rows, cols, N, 1), out.to(out_ptr.dtype.element_ty), mask=(rows < M) & (cols < N))
        if PREFETCH:
            grad = next_grad
            x = next_x
    if GRAD_WEIGHT:
        tl.store(partial_ptr + offsets(tl.program_id(0), cols, N, 1), total, mask=cols < N)


@triton.jit
def sum_partials_kernel(
    partial_ptr, out_ptr, P, N, TILE_P: tl.constexpr, TILE_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """``out [N]``: the sum of ``partial [P, N]`` (float32) over P, in a fixed order."""
    begin(DEPENDENT)
    cols = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)[None, :]
    total = tl.zeros((TILE_P, TILE_N), tl.float32)
    for start in range(0, P, TILE_P):
        rows = start + tl.arange(0, TILE_P)[:, None]
        mask = (rows < P) & (cols < N)
        total += tl.load(partial_ptr + offsets(rows, cols, N, 1), mask=mask, other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, 0, keep_dims=True).to(out_ptr.dtype.element_ty), mask=cols < N)
