"""Casts and GEMMs of groups of tokens in plain torch: a loop that computes each group separately.

Groups are adjacent rows. ``offsets`` has the end of each; the first group begins at row 0, each next one where the one
before it ends. A group may be empty. Rows after the last group belong to none: results have zeros there.

On a GPU nothing reads ``offsets`` on the host, so nothing can be raised for bad ones. They are read as if they had been
clamped: an end before the previous end is the previous end, and an end beyond the rows is the last row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from tritonfp8.reference import casts, gemms
from tritonfp8.reference.exact import gated_values
from tritonfp8.specs import (
    COLUMNWISE,
    ROWWISE,
    TENSORWISE,
    QuantSpec,
    check_group_spec,
    empty_grouped_scale,
    group_amax_sizes,
    group_column,
    grouped_columns,
    scale_shape,
    spec_of,
    transposed,
)
from tritonfp8.specs.formats import FORMATS


def group_bounds(offsets: Tensor, tokens: int) -> list[tuple[int, int]]:
    """First row and end of each group."""
    bounds, start = [], 0
    for end in offsets.tolist():
        bounds.append((start, min(max(end, start), tokens)))
        start = bounds[-1][1]
    return bounds


def _filled_groups(offsets: Tensor, tokens: int) -> Iterator[tuple[int, slice]]:
    """The groups that are not empty, with their rows."""
    for group, (start, end) in enumerate(group_bounds(offsets, tokens)):
        if end > start:
            yield group, slice(start, end)


def _empty_codes(shape: tuple[int, ...], spec: QuantSpec, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8, device=device).view(FORMATS[spec.format].dtype)


def write(to: Tensor, codes: Tensor) -> None:
    """Copy 8-bit floats."""
    # Not every device copies 8-bit floats.
    to.view(torch.uint8).copy_(codes.view(torch.uint8))


def swiglu(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``x [rows, 2 F]``, the gate first, ``[rows, F]``; each of the two ops rounds."""
    gate, up = x.chunk(2, dim=-1)
    return gated_values(gate, up, "silu")


def swiglu_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of ``gate_up [rows, 2 F]`` from the gradient of :func:`swiglu`, as autograd computes it."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.cat((torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)), dim=-1)


def swiglu_backward_amax(
    grad: Tensor, gate_up: Tensor, offsets: Tensor, spec: str, spec_t: str
) -> tuple[Tensor, Tensor]:
    """:func:`swiglu_backward`, and the amaxes that :func:`quantize_groups_both` of it needs: :func:`group_amax`."""
    found = swiglu_backward(grad, gate_up)
    return found, group_amax(found, offsets, spec, spec_t)


def group_amax(x: Tensor, offsets: Tensor, spec: str, spec_t: str) -> Tensor:
    """amax bits, int32, of the blocks of groups of rows of ``x``, and of its transpose, that span a whole dim.

    The blocks are rows, the columns of each group, and each group, where a spec has such blocks, in the order and with
    the gaps of :func:`tritonfp8.specs.group_amax_sizes`.
    """
    bits = x.float().view(torch.int32) & 0x7FFFFFFF
    groups = [bits[start:end] for start, end in group_bounds(offsets, len(bits))]
    columns = [part.amax(0) if len(part) else bits.new_zeros(bits.shape[1]) for part in groups]
    of = {
        ROWWISE: lambda: bits.amax(1),
        COLUMNWISE: lambda: torch.cat(columns),
        TENSORWISE: lambda: torch.stack([each.amax() for each in columns]),
    }
    blocks = (spec_of(spec).block, transposed(spec_of(spec_t).block))
    sizes = group_amax_sizes(len(bits), bits.shape[1], len(offsets), blocks)
    amax = bits.new_zeros(sum(sizes.values()))
    for (block, size), end in zip(sizes.items(), itertools.accumulate(sizes.values()), strict=True):
        part = of[block]()
        amax[end - size : end - size + len(part)] = part
    return amax


def sum_of_rows(x: Tensor, places: Tensor, factors: Tensor | None = None) -> Tensor:
    """The sum of some rows for each token.

    Args:
        x: ``[rows, N]``.
        places: ``[tokens, n]``, int64: which rows of ``x`` belong to a token.
        factors: ``[tokens, n]``, or None. Products are rounded to the common dtype.

    Returns:
        ``[tokens, N]`` in the dtype of ``x``, with ``factors`` in the common dtype. Rows are added in their order, in
        float32, and the sum is rounded once.
    """
    dtype = x.dtype if factors is None else torch.promote_types(x.dtype, factors.dtype)
    total = torch.zeros(len(places), x.shape[1], dtype=torch.promote_types(dtype, torch.float32), device=x.device)
    for i in range(places.shape[1]):
        rows = x[places[:, i]]
        total += (rows if factors is None else rows * factors[:, i, None]).to(total.dtype)
    return total.to(dtype)


def dots_of_rows(grad: Tensor, x: Tensor, places: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The dot product of each token's gradient with each of its rows: the gradient of factors of :func:`sum_of_rows`.

    Args:
        grad: ``[tokens, N]``, of the sums; rounded to the common dtype.
        x: ``[rows, N]``.
        places: ``[tokens, n]``, int64: which rows of ``x`` belong to a token.
        out_dtype: of the factors. Products are rounded to the common dtype of ``x`` and this.

    Returns:
        ``[tokens, n]`` in ``out_dtype``. Products are added in float32, in any order, and the sum is rounded once.
    """
    dtype = torch.promote_types(x.dtype, out_dtype)
    rows = x[places.reshape(-1)]
    expanded = grad.to(dtype)[:, None].expand(-1, places.shape[1], -1).reshape(rows.shape)
    return (expanded * rows).sum(1).to(out_dtype).view(places.shape)


def read_rows(x: Tensor, rows: Tensor | None, factors: Tensor | None, swiglu_of: bool = False) -> Tensor:
    """What a cast of groups quantizes, in memory of its own: see :func:`quantize_groups`."""
    if swiglu_of:
        return swiglu(x)
    if rows is None:
        return x
    return x[rows] if factors is None else (x[rows].float() * factors.float()[:, None]).to(x.dtype)


def quantize_groups(
    x: Tensor,
    offsets: Tensor,
    spec: str,
    transpose: bool = False,
    rows: Tensor | None = None,
    factors: Tensor | None = None,
    swiglu: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantize each group of rows of ``x``, or its transpose.

    Args:
        x: ``[tokens, K]``, any floating dtype.
        offsets: ``[groups]``, int32: the end of each group.
        spec: the text of a :class:`~tritonfp8.QuantSpec`.
        transpose: quantize the transpose of each group.
        rows: ``[tokens]``, int64: the rows of ``x``, of any number, that are quantized; None for all.
        factors: ``[tokens]``: a factor of each of these rows, which are rounded once to the dtype of ``x``; or None.
        swiglu: quantize :func:`swiglu` of ``x``.

    Returns:
        ``(qdata, scale)`` of a :class:`~tritonfp8.QuantizedGroups` in ``"rows"``, or in ``"columns"`` if
        ``transpose``. Rows of no group: quantized where each row has scales of its own, else zeros.
    """
    s = spec_of(spec)
    found = read_rows(x, rows, factors, swiglu)
    return columns_of(found, offsets, s) if transpose else _rows(found, offsets, s)


def _rows(x: Tensor, offsets: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    check_group_spec(spec, "rows")
    if spec.block[0] == 1:
        return casts.quantize(x, *spec.args)
    qdata = _empty_codes(tuple(x.shape), spec, x.device)
    scale = empty_grouped_scale(x.shape, spec, "rows", len(offsets), x.device)
    for group, (start, end) in enumerate(group_bounds(offsets, len(x))):
        codes, scale[group : group + 1] = casts.quantize(x[start:end], *spec.args)
        write(qdata[start:end], codes)
    return qdata, scale


def padded_rows(x: Tensor, offsets: Tensor) -> Tensor:
    """Rows of groups, each group from a multiple of the alignment on, zeros between them."""
    tokens, width = x.shape
    padded = x.new_zeros((grouped_columns(tokens, len(offsets)), width))
    for group, (start, end) in enumerate(group_bounds(offsets, tokens)):
        first = group_column(start, group)
        padded[first : first + end - start] = x[start:end]
    return padded


def columns_of(x: Tensor, offsets: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """The transpose of each group of rows, quantized: groups in ``"columns"``."""
    padded = padded_rows(x, offsets)
    shape = padded.shape[::-1]
    if spec.block[1] != -1:
        return casts.quantize(padded, *spec.args, True)
    firsts = [group_column(start, group) for group, (start, _) in enumerate(group_bounds(offsets, len(x)))]
    qdata = _empty_codes(shape, spec, x.device)
    scale = empty_grouped_scale(shape, spec, "columns", len(offsets), x.device)
    for group, (first, last) in enumerate(itertools.pairwise([*firsts, shape[1]])):
        codes, scale[:, group : group + 1] = casts.quantize(padded[first:last], *spec.args, True)
        write(qdata[:, first:last], codes)
    return qdata, scale


def quantize_matrices(
    x: Tensor, spec: str, transpose: bool = False, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize each matrix of ``x``, or its transpose.

    Args:
        x: ``[groups, N, K]``, any floating dtype and layout.
        spec: the text of a :class:`~tritonfp8.QuantSpec`.
        transpose: quantize the transpose of each matrix.
        amax: float32, ``[groups, ...]``: of each matrix as :func:`~tritonfp8.reference.quantize` takes it.

    Returns:
        ``(qdata, scale)`` of a :class:`~tritonfp8.QuantizedGroups` in ``"matrices"``.
    """
    s = spec_of(spec)
    groups, *shape = x.shape
    shape = [groups, *(reversed(shape) if transpose else shape)]
    qdata = _empty_codes(tuple(shape), s, x.device)
    scale = empty_grouped_scale(shape, s, "matrices", groups, x.device)
    for i in range(groups):
        codes, scale[i] = casts.quantize(x[i], spec, transpose, None if amax is None else amax[i])
        write(qdata[i], codes)
    return qdata, scale


def quantize_matrices_with_amax(
    x: Tensor, spec: str, spec_t: str, codes: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """``(*quantize_matrices(x, spec), amax)``.

    ``amax`` is float32, ``[groups, ...]``, of the blocks of the transpose of each matrix by ``spec_t``:
    ``quantize_matrices(x, spec_t, True, amax)`` is the cast of the transposes. ``codes``: see
    :func:`~tritonfp8.reference.quantize_with_amax`.
    """
    found = [casts.quantize_with_amax(matrix, spec, spec_t, codes)[2] for matrix in x]
    shape = (0, *scale_shape((x.shape[2], x.shape[1]), spec_of(spec_t).block))
    return *quantize_matrices(x, spec), torch.stack(found) if found else torch.empty(shape, device=x.device)


def scaled_grouped_matmul(
    a: Tensor,
    a_scale: Tensor,
    a_spec: str,
    b: Tensor,
    b_scale: Tensor,
    b_spec: str,
    offsets: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulation: str = "precise",
    batch_invariant: bool = False,
    tokens: int = 0,
) -> Tensor:
    """A GEMM for each group, on quantized operands, as :func:`scaled_matmul` computes it.

    Args:
        a: in ``"rows"``, ``[tokens, K]``; or in ``"columns"``, ``[M, columns]``.
        b: in ``"matrices"``, ``[groups, N, K]``; or in ``"columns"``, ``[N, columns]``.
        offsets: ``[groups]``, int32: the end of each group.
        bias: ``[groups, N]`` or None; None for columns.
        out_dtype, accumulation, batch_invariant: see :func:`scaled_matmul`.
        tokens: of columns: the rows of the tensor that was quantized, as far as offsets may reach.

    Returns:
        ``[tokens, N]``, ``a @ b[group].T + bias[group]``; or, of columns, ``[groups, M, N]``: ``a @ b.T`` over the
        columns of each group, zero for an empty group.
    """
    dtype = out_dtype or torch.bfloat16
    options = (None, None, dtype, accumulation, batch_invariant)
    if b.ndim == 3:
        out = a.new_zeros((len(a), b.shape[1]), dtype=dtype)
        for group, rows in _filled_groups(offsets, len(a)):
            scaled = slice(group, group + 1) if spec_of(a_spec).block[0] == -1 else rows
            out[rows] = gemms.scaled_matmul(
                a[rows], a_scale[scaled], a_spec, b[group], b_scale[group], b_spec,
                None if bias is None else bias[group], *options,
            )  # fmt: skip
        return out
    out = a.new_zeros((len(offsets), len(a), len(b)), dtype=dtype)
    for group, columns in _column_groups(offsets, tokens):
        lhs_scale, rhs_scale = (
            scale[:, _blocks(columns, group, spec_of(spec).block[1])]
            for scale, spec in ((a_scale, a_spec), (b_scale, b_spec))
        )
        out[group] = gemms.scaled_matmul(
            a[:, columns], lhs_scale, a_spec, b[:, columns], rhs_scale, b_spec, None, *options
        )
    return out


def _column_groups(offsets: Tensor, tokens: int) -> Iterator[tuple[int, slice]]:
    """The groups that are not empty, with their columns."""
    for group, rows in _filled_groups(offsets, tokens):
        at = group_column(rows.start, group)
        yield group, slice(at, at + rows.stop - rows.start)


def _blocks(columns: slice, group: int, size: int) -> slice:
    """The scales of these columns."""
    return slice(group, group + 1) if size == -1 else slice(columns.start // size, -(-columns.stop // size))


def grouped_matmul(a: Tensor, b: Tensor, offsets: Tensor, bias: Tensor | None = None) -> Tensor:
    """A GEMM for each group in the operands' own dtype, where a recipe keeps it in high precision.

    Args:
        a: ``[tokens, K]``; or ``[M, tokens]``.
        b: ``[groups, N, K]``; or ``[N, tokens]``.
        offsets: ``[groups]``, int32: the end of each group.
        bias: ``[groups, N]`` or None; None if ``b`` has two dims.

    Returns:
        ``[tokens, N]``; or ``[groups, M, N]``, the sum over the tokens of each group.
    """
    if b.ndim == 3:
        out = a.new_zeros((len(a), b.shape[1]))
        for group, rows in _filled_groups(offsets, len(a)):
            out[rows] = gemms.matmul(a[rows], b[group], None if bias is None else bias[group])
        return out
    out = a.new_zeros((len(offsets), len(a), len(b)))
    for group, columns in _filled_groups(offsets, a.shape[1]):
        out[group] = gemms.matmul(a[:, columns], b[:, columns])
    return out


def grouped_sum(x: Tensor, offsets: Tensor) -> Tensor:
    """``x [tokens, N]`` summed over the rows of each group, ``[groups, N]``: the gradient of a bias."""
    out = x.new_zeros((len(offsets), x.shape[1]))
    for group, rows in _filled_groups(offsets, len(x)):
        out[group] = x[rows].sum(0)
    return out
