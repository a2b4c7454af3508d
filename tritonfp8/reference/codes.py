"""What is made from codes: transposes, 8-bit codes, GEMMs; both orientations of groups. Plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonfp8.reference import casts, gemms, grouped
from tritonfp8.specs import EXPANDED, check_group_spec, check_transposable, empty_grouped_scale, moves_codes, spec_of
from tritonfp8.specs.formats import FORMATS


def transpose_codes(
    x: Tensor,
    scale: Tensor,
    spec: str,
    spec_t: str,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantize the transpose of a quantized tensor by ``spec_t``, from the values of its codes.

    For one matrix: ``quantize(dequantize(codes, scale, spec, float32), spec_t, transpose=True)``. Square blocks of one
    spec keep codes and scales as they are. A code that stands for 2^128 counts as the infinity that it dequantizes to.

    Args:
        x: codes ``[M, N]``, or matrices ``[groups, M, N]``. Or the values that the codes were made of by ``scale``:
            their codes are then made again.
        scale: of the codes.
        spec: the text of the :class:`~tritonfp8.QuantSpec` of ``x``.
        spec_t: of the result. Both have one format and scales that are powers of two; see
            :func:`~tritonfp8.specs.check_transposable`.
        amax: float32, one value for each block of the result, used in place of the block's own amax.

    Returns:
        ``(qdata, scale)``, ``[N, M]`` or ``[groups, N, M]``.
    """
    if x.ndim == 2:
        return casts.transposed_codes(x, scale, spec, spec_t, amax)
    groups, m, n = x.shape
    s_t = spec_of(spec_t)
    qdata = torch.empty((groups, n, m), dtype=FORMATS[s_t.format].dtype, device=x.device)
    scales = empty_grouped_scale(qdata.shape, s_t, "matrices", groups, x.device)
    for i in range(groups):
        of_matrix = None if amax is None else amax[i]
        codes, scales[i] = casts.transposed_codes(x[i], scale[i], spec, spec_t, of_matrix)
        grouped.write(qdata[i], codes)
    return qdata, scales


def expand_codes(
    qdata: Tensor, scale: Tensor, spec: str, row_scale: Tensor | None = None, offsets: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """8-bit codes with a scale a row of codes of fewer bits: ``quantize(dequantize(codes, float32), EXPANDED)``.

    An e2m1 value with its e8m0 scale is exact in e4m3 by the row's scale if its block's exponent lies up to 14 below
    the largest one of a block of the row that is not zero. A value that is not exact is rounded to nearest even. A row
    with a NaN, or with a value beyond float32, becomes NaN.

    Args:
        qdata: ``[..., K / 2]`` uint8, two codes a byte.
        scale: of the codes.
        spec: the text of their :class:`~tritonfp8.QuantSpec`.
        row_scale: float32 ``[..., 1]``, what :func:`measure_rows` found; saves a pass over the codes.
        offsets: of matrices ``[E, N, K / 2]``: int32 ``[E]``, the end of each group of tokens that a grouped GEMM
            multiplies by them. The result of a matrix without tokens is undefined; kernels leave most of them out.

    Returns:
        ``(qdata, scale)``: e4m3 ``[..., K]`` and float32 ``[..., 1]``.
    """
    values = casts.dequantize(qdata, scale, spec, torch.float32)
    if row_scale is None:
        return casts.quantize(values, *EXPANDED.args)
    return casts.codes_by(values, row_scale, EXPANDED), row_scale.clone()


def measure_rows(qdata: Tensor, scale: Tensor, spec: str) -> tuple[Tensor, Tensor]:
    """The scales that :func:`expand_codes` gives rows, and how many values of each row it rounds.

    Args:
        qdata, scale, spec: see :func:`expand_codes`.

    Returns:
        ``(scale, rounded)``: float32 and int32, both ``[..., 1]``; ``rounded`` is zero where the row is NaN.
    """
    values = casts.dequantize(qdata, scale, spec, torch.float32)
    codes, scales = casts.quantize(values, *EXPANDED.args)
    exact = casts.dequantize(codes, scales, *EXPANDED.args, torch.float32) == values
    return scales, ((~exact).sum(-1, keepdim=True) * ~scales.isnan()).int()


def packed_matmul(
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
    b_row_scale: Tensor | None = None,
) -> Tensor:
    """:func:`~tritonfp8.reference.scaled_matmul` of a weight ``b [N, K / 2]`` whose codes are expanded first.

    The other arguments are as there; for ``b_row_scale [N, 1]`` see :func:`expand_codes`.
    """
    codes, scales = expand_codes(b, b_scale, b_spec, b_row_scale)
    return gemms.scaled_matmul(
        a, a_scale, a_spec, codes, scales, *EXPANDED.args,
        bias, activation, residual, out_dtype, accumulation, batch_invariant,
    )  # fmt: skip


def packed_grouped_matmul(
    a: Tensor,
    a_scale: Tensor,
    a_spec: str,
    b: Tensor,
    b_scale: Tensor,
    b_spec: str,
    offsets: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = torch.bfloat16,
    accumulation: str = "precise",
    batch_invariant: bool = False,
    b_row_scale: Tensor | None = None,
) -> Tensor:
    """:func:`~tritonfp8.reference.scaled_grouped_matmul` of weights ``b [E, N, K / 2]`` that are expanded first.

    The other arguments are as there, of groups of rows; for ``b_row_scale [E, N, 1]`` see :func:`expand_codes`.
    """
    codes, scales = expand_codes(b, b_scale, b_spec, b_row_scale)
    return grouped.scaled_grouped_matmul(
        a, a_scale, a_spec, codes, scales, *EXPANDED.args, offsets, bias, out_dtype, accumulation, batch_invariant
    )


def quantize_groups_both(
    x: Tensor,
    offsets: Tensor,
    spec: str,
    spec_t: str,
    rows: Tensor | None = None,
    factors: Tensor | None = None,
    swiglu: bool = False,
    amax: Tensor | None = None,
    codes: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``quantize_groups(x, offsets, spec)`` and ``quantize_groups(x, offsets, spec_t, transpose=True)``.

    Args:
        x, offsets, spec, spec_t, rows, factors, swiglu: see :func:`~tritonfp8.reference.quantize_groups`.
        amax: from the :func:`swiglu_backward_amax` that returned ``x``; saves a pass over ``x``.
        codes: the second pair is :func:`transpose_group_codes` of the first.
    """
    found = grouped.read_rows(x, rows, factors, swiglu)
    pair = grouped.quantize_groups(found, offsets, spec)
    if codes:
        return *pair, *transpose_group_codes(*pair, offsets, spec, spec_t)
    return *pair, *grouped.quantize_groups(found, offsets, spec_t, True)


def transpose_group_codes(x: Tensor, scale: Tensor, offsets: Tensor, spec: str, spec_t: str) -> tuple[Tensor, Tensor]:
    """:func:`~tritonfp8.reference.transpose_codes` of each group of rows of ``x``.

    Args:
        x: codes ``[tokens, N]``, or the values that they were made of by ``scale``.
        scale: of the codes.
        offsets: ``[groups]``, int32: the end of each group.
        spec, spec_t: of ``x`` and of the result.

    Returns:
        ``(qdata, scale)`` of a :class:`~tritonfp8.QuantizedGroups` in ``"columns"``.
    """
    s, s_t = spec_of(spec), spec_of(spec_t)
    check_group_spec(s, "rows")
    check_transposable(s, s_t)
    if s.block[0] == 1:
        return grouped.columns_of(
            casts.dequantize(casts.codes_by(x, scale, s), scale, spec, torch.float32), offsets, s_t
        )
    moved = moves_codes(s, s_t)
    values = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    bounds = grouped.group_bounds(offsets, len(x))
    for group, (start, end) in enumerate(bounds):
        of_group = scale[group : group + 1]
        codes = casts.codes_by(x[start:end], of_group, s)
        values[start:end] = codes.float() if moved else casts.dequantize(codes, of_group, spec, torch.float32)
    if not moved:
        return grouped.columns_of(values, offsets, s_t)
    padded = grouped.padded_rows(values, offsets)
    codes = casts.codes_of(padded.t(), FORMATS[s.format]).contiguous().view(FORMATS[s.format].dtype)
    return codes, scale.t().clone(memory_format=torch.contiguous_format)
