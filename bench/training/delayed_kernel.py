"""The cast of :mod:`bench.training.delayed`: that of the package, which also finds the amax of its tensor."""

import triton
import triton.language as tl

from tritonfp8.kernels.cast.quantize import load_masked, quantize_kernel, spread_rows, tile_index
from tritonfp8.kernels.numerics import amax_bits, magnitudes, reduce_max
from tritonfp8.kernels.pdl import begin


@triton.jit
def delayed_kernel(
    found_ptr, x_ptr, q_ptr, s_ptr, amax_ptr, qt_ptr, st_ptr, amax_t_ptr, sums_ptr, M, N, stride_xm, stride_xn,
    groups_m, groups_n, stride_qm, stride_qn, stride_sm, stride_sn, stride_am, stride_an, parts, stride_part,
    groups_tm, groups_tn, stride_qtm, stride_qtn, stride_stm, stride_stn, stride_atm, stride_atn,
    parts_t, stride_part_t,
    ROWS: tl.constexpr, COLS: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr, QMAX_MANTISSA: tl.constexpr,
    MANTISSA_BITS: tl.constexpr, EMIN: tl.constexpr,
    E8M0: tl.constexpr, POW2: tl.constexpr, PARTS: tl.constexpr,
    ROWS_T: tl.constexpr, COLS_T: tl.constexpr, QMAX_T: tl.constexpr, EMAX_T: tl.constexpr,
    QMAX_MANTISSA_T: tl.constexpr, MANTISSA_BITS_T: tl.constexpr, EMIN_T: tl.constexpr,
    E8M0_T: tl.constexpr, POW2_T: tl.constexpr, PARTS_T: tl.constexpr,
    NORMAL: tl.constexpr, TRANSPOSED: tl.constexpr, SUM: tl.constexpr, DIRECT_CAST: tl.constexpr, EVEN: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """:func:`quantize_kernel`, and the amax of ``x`` (bits of float32) into ``found_ptr`` if it is larger."""
    begin(DEPENDENT)
    pid_m, pid_n = tile_index(tl.num_programs(0) - 1 - tl.program_id(0), M, N, TILE_M, TILE_N, GROUP)
    rows = spread_rows(pid_m, TILE_M, R)
    cols = pid_n * TILE_N + tl.arange(0, TILE_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    x = load_masked(x_ptr + rows.to(tl.int64)[:, None] * stride_xm + cols.to(tl.int64)[None, :] * stride_xn, mask, EVEN)
    highest = reduce_max(reduce_max(magnitudes(x), 1), 0)
    tl.atomic_max(found_ptr, amax_bits(highest, x.dtype), sem="relaxed")
    quantize_kernel(
        x_ptr, q_ptr, s_ptr, amax_ptr, qt_ptr, st_ptr, amax_t_ptr, sums_ptr, M, N, stride_xm, stride_xn, groups_m,
        groups_n, stride_qm, stride_qn, stride_sm, stride_sn, stride_am, stride_an, parts, stride_part,
        groups_tm, groups_tn, stride_qtm, stride_qtn, stride_stm, stride_stn, stride_atm, stride_atn, parts_t,
        stride_part_t, ROWS, COLS, QMAX, EMAX, QMAX_MANTISSA, MANTISSA_BITS, EMIN, E8M0, POW2, PARTS, ROWS_T,
        COLS_T, QMAX_T, EMAX_T, QMAX_MANTISSA_T, MANTISSA_BITS_T, EMIN_T, E8M0_T, POW2_T, PARTS_T, NORMAL,
        TRANSPOSED, SUM, DIRECT_CAST, EVEN, TILE_M, TILE_N, R, GROUP, DEPENDENT,
    )  # fmt: skip
