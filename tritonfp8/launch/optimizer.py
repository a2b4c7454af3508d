"""Launch the optimizer step of stored weights: see :mod:`tritonfp8.kernels.optim.adamw`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tritonfp8.kernels.optim import adamw as kernels
from tritonfp8.launch.constants import kernel_constants
from tritonfp8.launch.kernel_cache import run
from tritonfp8.reference import write_scales
from tritonfp8.specs import amax_shape, spec_of
from tritonfp8.tuning import optimizer_tiles

STEP, AMAX, GIVEN = range(3)
# Fused multiplications and additions would give other bits than the reference.
OPTIONS = {"enable_fp_fusion": False}


def _launch(
    mode: int, qdata: Tensor, scale: Tensor, moments: Sequence[Tensor | None], grad: Tensor, numbers: Tensor,
    keys: Tensor | None, amax: Tensor | None, spec: str, scale_block: Sequence[int], place: Sequence[int],
    stochastic: bool,
) -> None:  # fmt: skip
    (m, k), block = qdata.shape, spec_of(spec).block
    above, left = (0 if b == -1 else at % b for at, b in zip(place, block, strict=True))
    tile = optimizer_tiles.tile(block, k)
    programs = -(-(m + above) // tile.m) * -(-(k + left) // tile.n)
    if not m * k:
        return
    constants = {
        **kernel_constants(spec_of(spec), block), "S_ROWS": scale_block[0], "S_COLS": scale_block[1],
        "SCALED_MOMENTS": moments[2] is not None, "STOCHASTIC": stochastic, "MODE": mode,
        "TILE_M": tile.m, "TILE_N": tile.n,
    }  # fmt: skip
    stored = scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
    bits = None if amax is None else amax.view(torch.int32)
    pointers = (qdata, stored, *moments, grad.contiguous(), numbers, keys, bits)
    grid_cols = amax_shape(qdata.shape, block, place)[1]
    integers = (m, k, *place, *scale.stride(), grid_cols)
    run(kernels.adamw_kernel, programs, pointers, integers, constants, **tile.options(), **OPTIONS)


def adamw_amax(
    qdata: Tensor, scale: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, numbers: Tensor, spec: str,
    scale_block: Sequence[int], place: Sequence[int], exp_avg_scale: Tensor | None = None,
    exp_avg_sq_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See :func:`tritonfp8.reference.adamw_amax`."""
    amax = torch.zeros(amax_shape(qdata.shape, spec_of(spec).block, place), device=qdata.device)
    moments = exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale
    _launch(AMAX, qdata, scale, moments, grad, numbers, None, amax, spec, scale_block, place, False)
    return amax


def adamw(
    qdata: Tensor, scale: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, numbers: Tensor, keys: Tensor,
    spec: str, scale_block: Sequence[int], place: Sequence[int], stochastic: bool, exp_avg_scale: Tensor | None = None,
    exp_avg_sq_scale: Tensor | None = None, amax: Tensor | None = None,
) -> None:  # fmt: skip
    """See :func:`tritonfp8.reference.adamw`."""
    moments, block = (exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale), spec_of(spec).block
    grad, tile = grad.contiguous(), optimizer_tiles.tile(block, qdata.shape[1])
    begins_block = all(at % b == 0 for at, b in zip(place, block, strict=True) if b != -1)
    if amax is None and begins_block and optimizer_tiles.has_blocks(tile, block, qdata.shape[1]):
        _launch(STEP, qdata, scale, moments, grad, numbers, keys, None, spec, scale_block, place, stochastic)
        return
    if amax is None:
        amax = adamw_amax(
            qdata, scale, exp_avg, exp_avg_sq, grad, numbers, spec, scale_block, place, exp_avg_scale, exp_avg_sq_scale
        )
    amax = amax.contiguous()
    _launch(GIVEN, qdata, scale, moments, grad, numbers, keys, amax, spec, scale_block, place, stochastic)
    write_scales(scale, amax, spec, qdata.shape, scale_block, place)
