"""Which rows a tile of a cast has, and their values: as they lie, picked from others, or made by SwiGLU."""

from collections import namedtuple

import triton
import triton.language as tl

from tritonfp8.kernels.cast.quantize import load_masked
from tritonfp8.kernels.group_table import FIELDS
from tritonfp8.kernels.numerics import logistic

# Where rows come from: ``x``, the rows of it that are picked, and their factors.
Source = namedtuple("Source", "x_ptr picked_ptr factors_ptr stride_m stride_n")


@triton.jit
def rows_of(tile, table_ptr, rows, MATRICES: tl.constexpr, TILE: tl.constexpr):
    """Group of a tile, first row of the group, its number of rows, and which tile of the group it is."""
    if MATRICES:
        tiles = tl.cdiv(rows, TILE)
        group = tile // tiles
        return group, group * rows, rows, tile % tiles
    else:
        at = table_ptr + tile * FIELDS
        start = tl.load(at + 3)
        return tl.load(at), start, tl.load(at + 2) - start, (tl.load(at + 1) - start) // TILE


@triton.jit
def of_group(pointer, group, start, stride_row, stride_group, ROWS: tl.constexpr, MATRICES: tl.constexpr):
    """Where the values of a group begin: scales that tokens share are found by the group, others by its first row."""
    if MATRICES or ROWS == -1:
        return pointer + group.to(tl.int64) * stride_group
    else:
        return pointer + start.to(tl.int64) * stride_row


@triton.jit
def swiglu(gate, up):
    """``silu(gate) * up``, rounded as by two ops."""
    x = gate.to(tl.float32)
    silu = (x * logistic(x)).to(gate.dtype)
    return (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def grad_of_gate(grad, gate, up):
    """The gradient of ``gate``, rounded as by the backward of two ops."""
    x = gate.to(tl.float32)
    s = logistic(x)
    of_silu = (grad.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
    return (of_silu.to(tl.float32) * (s * tl.fma(x, 1.0 - s, 1.0))).to(gate.dtype)


@triton.jit
def load_rows(source, start, count, within, cols, mask, SOURCE: tl.constexpr, EVEN: tl.constexpr):
    """Rows ``within`` of a group.

    SOURCE: ``rows`` of x, or rows that are ``picked``, or picked and ``scaled`` by their factors. ``codes`` of x and
    ``cast``, values whose codes have known scales, are rows of x, too: :func:`values_by_scales` reads them.
    """
    if SOURCE == "codes":
        # A masked load of 8-bit elements does not always fill in zeros (Triton 3.6, H200): they are written.
        start_of = source.x_ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
        rows = start_of + start.to(tl.int64) * source.stride_m + within.to(tl.int64)[:, None] * source.stride_m
        pointers = rows + cols.to(tl.int64)[None, :] * source.stride_n
        codes = tl.load(pointers) if EVEN else tl.where(mask, tl.load(pointers, mask=mask, other=0), 0)
        return codes.to(source.x_ptr.dtype.element_ty, bitcast=True)
    else:
        if SOURCE == "rows" or SOURCE == "cast":
            rows = source.x_ptr + start.to(tl.int64) * source.stride_m
            pointers = rows + within.to(tl.int64)[:, None] * source.stride_m
        else:
            row = tl.load(source.picked_ptr + start + within, mask=within < count, other=0)
            pointers = source.x_ptr + row.to(tl.int64)[:, None] * source.stride_m
        x = load_masked(pointers + cols.to(tl.int64)[None, :] * source.stride_n, mask, EVEN)
        if SOURCE == "scaled":
            factors = tl.load(source.factors_ptr + start + within, mask=within < count, other=0.0).to(tl.float32)
            return (x.to(tl.float32) * factors[:, None]).to(x.dtype)
        else:
            return x
