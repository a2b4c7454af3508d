"""The figures of an operand: how large it is, and what its quantization loses. Computed on its device, unread."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.compat import torch_private
from tritonfp8.functional import dequantize, quantize
from tritonfp8.layers.stored import plain_weight
from tritonfp8.specs import ROWWISE, TENSORWISE, QuantSpec
from tritonfp8.specs.formats import FORMATS
from tritonfp8.workflow.outputs import local_part

FIELDS = (
    "amax",
    "scale_min",
    "scale_max",
    "saturated_share",
    "flushed_share",
    "zero_share",
    "nonfinite_share",
    "sqnr",
    "outlier_ratio",
    "outlier_channel",
)
"""The figures of an operand; :func:`measure_all` describes them."""

RUN = 128
"""Consecutive rows that are measured together: the rows of the largest block, so that no block is cut."""


def local_matrix(x: Tensor) -> Tensor:
    """``x [..., K]`` as ``[M, K]``, without a gradient; of a sharded tensor, the shard of this rank."""
    return torch.atleast_2d(_local(x)).flatten(0, -2)


def local_matrices(x: Tensor) -> Tensor:
    """``x [E, N, K]`` without a gradient; of a sharded tensor, the shard of this rank."""
    return _local(x)


def _local(x: Tensor) -> Tensor:
    found: Tensor = local_part(plain_weight(x.detach()))
    return found


def some_rows(x: Tensor, rows: int) -> Tensor:
    """:func:`view_of_rows` as a copy, ``[rows, K]``.

    It is one launch: the runs are a strided view, and not an index, which the host would have to send.
    """
    return view_of_rows(x, rows).clone(memory_format=torch.contiguous_format).view(-1, x.shape[1])


def view_of_rows(x: Tensor, rows: int) -> Tensor:
    """At most ``rows`` rows of ``x [M, K]``, or 128 if that is more: ``[runs, rows of a run, K]``, evenly spread."""
    if x.shape[0] <= max(rows, RUN):
        return x[None]
    all_runs = x.shape[0] // RUN
    step = -(-all_runs // max(rows // RUN, 1))
    runs = -(-all_runs // step)
    row, column = x.stride()
    return x.as_strided((runs, RUN, x.shape[1]), (step * RUN * row, row, column))


def whole_amax(x: Tensor) -> Tensor:
    """The amax of all elements, float32, of no dims."""
    if x.dtype == torch.float64:
        return torch.linalg.vector_norm(x, math.inf).float()
    # Torch's own: on the host, one launch of it takes a third of the time of a call of ours.
    return torch.linalg.vector_norm(x, math.inf, dtype=torch.float32)


def whole_amaxes(tensors: Sequence[Tensor]) -> Tensor:
    """:func:`whole_amax` of each, as one tensor."""
    if tensors[0].dtype == torch.float64:
        return torch.stack([whole_amax(x) for x in tensors])
    return torch_private.amaxes(tensors)


@torch.no_grad()
def measure_all(parts: Tensor, whole: Tensor, elements: int, spec: QuantSpec | None) -> Tensor:
    """The figures of operands of one shape, computed together: host time is the same as for one operand.

    ``amax`` covers all elements. The other figures are of ``rows`` rows, and exact if there are no more.

    ======================  ===========================================================================================
    ``amax``                largest magnitude; infinite or NaN if the operand has such a value
    ``scale_min, _max``     range of the scales; NaN without quantization, and if a block has a NaN or an infinity
    ``saturated_share``     share of elements that lie beyond the largest value of the format, and are clipped
    ``flushed_share``       share of elements that are not zero, but become zero
    ``zero_share``          share of elements that are zero
    ``nonfinite_share``     share of elements that are NaN or infinite
    ``sqnr``                dB, ``10 log10(sum(x^2) / sum((dequantized - x)^2))`` over the finite elements; infinite
                            without an error, and minus infinity where a NaN spoils finite elements of its block
    ``outlier_ratio``       largest amax of a column, over the median of the amaxes of the columns that are not zero
    ``outlier_channel``     that column
    ======================  ===========================================================================================

    Args:
        parts: ``[operands, rows, K]``, the rows that are measured; bfloat16, float16, float32 or float64.
        whole: float32 ``[operands]``, the amax of each whole operand.
        elements: elements of a whole operand.
        spec: how each is quantized, along K; None for high precision.

    Returns:
        float64 ``[operands, len(FIELDS)]`` on the device of ``parts``. The host does not wait for it.
    """
    with torch.autocast(parts.device.type, enabled=False):
        if spec is None:
            return ops.operand_figures(parts, whole, elements, math.inf)
        qdata, result, scale = _round_trip(parts, whole, spec)
        low, high = scale.float().flatten(1).aminmax(dim=1)
        # Other scales reach up to the amax. Nothing is clipped by them.
        limit = FORMATS[spec.format].qmax if spec.scale_rounding == "floor" else math.inf
        return ops.operand_figures(parts, whole, elements, limit, result, qdata, low, high)


def worst_of(figures: Tensor) -> Tensor:
    """The figures of several operands as one: each figure of the operand where it is worst.

    The largest of each, but the smallest ``scale_min`` and ``sqnr``; ``outlier_channel`` belongs to ``outlier_ratio``.

    Args:
        figures: ``[operands, len(FIELDS)]``.

    Returns:
        ``[len(FIELDS)]``.
    """
    worst = figures.amax(0)
    for field in ("scale_min", "sqnr"):
        worst[FIELDS.index(field)] = figures[:, FIELDS.index(field)].amin()
    ratio, channel = FIELDS.index("outlier_ratio"), FIELDS.index("outlier_channel")
    # By an index in Python the host would wait for it.
    worst[channel] = figures[:, channel].index_select(0, figures[:, ratio].argmax(0, keepdim=True))[0]
    return worst


def _round_trip(parts: Tensor, whole: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, dequantized values and scales, each ``[operands, ...]``."""
    if spec.block != TENSORWISE:
        q = quantize(parts, spec)
        return q.qdata, dequantize(q), q.scale
    # A tensorwise scale covers all rows, not only the measured ones. Each operand, as one row, has its own.
    q = quantize(parts.flatten(1), dataclasses.replace(spec, block=ROWWISE), amax=whole[:, None])
    return q.qdata.view(parts.shape), dequantize(q).view(parts.shape), q.scale
