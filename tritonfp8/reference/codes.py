"""The transpose of a quantized tensor, made from its codes: in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonfp8.reference import casts, grouped
from tritonfp8.specs import empty_grouped_scale, spec_of
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
