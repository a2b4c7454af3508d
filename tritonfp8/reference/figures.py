"""The figures of operands in plain torch: how large they are, and what their quantization loses."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FIGURES = 10

# Scaling rounds in float32: an amax may come out a little above the format's largest value without being clipped.
_ROUNDING = 1 + 2.0**-20


def _share(mask: Tensor) -> Tensor:
    """The share of True in each ``mask[i]``."""
    return mask.sum((1, 2)).double() / mask[0].numel()


def _nonfinite_share(finite: Tensor, whole: Tensor, elements: int) -> Tensor:
    share = _share(~finite)
    # A row that was not measured may have the only one.
    return share.where(whole.isfinite(), share.clamp(min=1 / elements))


def _outlier(values: Tensor) -> tuple[Tensor, Tensor]:
    """The largest amax of a column over the median amax of the columns that are not zero; and that column."""
    columns = torch.linalg.vector_norm(values, math.inf, dim=1)
    median = columns.where(columns > 0, math.nan).nanmedian(1).values
    return (columns.amax(1) / median).nan_to_num(1.0), columns.argmax(1)


def operand_figures(
    x: Tensor,
    whole: Tensor,
    elements: int,
    limit: float,
    result: Tensor | None = None,
    qdata: Tensor | None = None,
    low: Tensor | None = None,
    high: Tensor | None = None,
) -> Tensor:
    """The figures of operands of one shape; all of their rows are measured, or some.

    Args:
        x: ``[operands, rows, K]``, the rows that are measured; bfloat16, float16, float32 or float64.
        whole: float32 ``[operands]``, the amax of each whole operand.
        elements: elements of a whole operand.
        limit: largest magnitude of the format if scales may clip, else infinite.
        result: float32, like ``x``: its dequantized values. None for high precision.
        qdata: like ``x``, its codes; given with ``result``.
        low: float32 ``[operands]``, the least scale of each; given with ``result``.
        high: float32 ``[operands]``, the largest scale of each; given with ``result``.

    Returns:
        float64 ``[operands, 10]``: :func:`tritonfp8.workflow.health.statistics.measure_all` describes them.
    """
    values = x.float()
    finite = values.isfinite()
    values = values.where(finite, 0)
    none = torch.zeros_like(whole, dtype=torch.float64)
    saturated, flushed, sqnr = none, none, torch.full_like(none, math.inf)
    least = most = torch.full_like(none, math.nan)
    if result is not None and qdata is not None and low is not None and high is not None:
        least, most = low, high
        if math.isfinite(limit):
            saturated = _share((qdata.float().abs() == limit) & (values.abs() > result.abs() * _ROUNDING))
        flushed = _share(torch.logical_and(result == 0, values))
        # As norms in float64: squares of large float32 values are infinite.
        signal = torch.linalg.vector_norm(values, dim=(1, 2), dtype=torch.float64)
        noise = torch.linalg.vector_norm((result - values).where(finite, 0), dim=(1, 2), dtype=torch.float64)
        sqnr = (20 * torch.log10(signal / noise)).nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        sqnr = sqnr.where(noise != 0, math.inf)
    lost = _nonfinite_share(finite, whole, elements)
    found = (whole.double(), least, most, saturated, flushed, _share(x == 0), lost, sqnr, *_outlier(values))
    return torch.stack(found, 1)
