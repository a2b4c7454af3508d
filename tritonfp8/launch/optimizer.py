"""Launch the optimizer step of stored weights: see :mod:`tritonfp8.kernels.optim.adamw`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritonfp8.kernels.optim import adamw as kernels
from tritonfp8.launch.kernel_cache import run
from tritonfp8.launch.plan import kernel_constants
from tritonfp8.reference import write_scales
from tritonfp8.specs import TENSORWISE, amax_shape, spec_of
from tritonfp8.tuning import CastTile, optimizer_tiles

STEP, AMAX, GIVEN = range(3)
# Fused multiplications and additions would give other bits than the reference.
OPTIONS = {"enable_fp_fusion": False}


def _launch(
    kernel: Any, programs: int, tile: CastTile, mode: int, qdata: Tensor, scale: Tensor,
    moments: Sequence[Tensor | None], grad: Tensor, numbers: Tensor, keys: Tensor | None, amax: Tensor | None,
    spec: str, scale_block: Sequence[int], place: Sequence[int], stochastic: bool,
) -> None:  # fmt: skip
    (m, k), block = qdata.shape, spec_of(spec).block
    if not m * k:
        return
    constants = {
        **kernel_constants(spec_of(spec), block), "S_ROWS": scale_block[0], "S_COLS": scale_block[1],
        "SCALED": moments[2] is not None, "STOCHASTIC": stochastic, "MODE": mode,
        "TILE_M": tile.m, "TILE_N": tile.n,
    }  # fmt: skip
    stored = scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
    bits = None if amax is None else amax.view(torch.int32)
    pointers = (qdata, stored, *moments, grad.contiguous(), numbers, keys, bits)
    grid_cols = amax_shape(qdata.shape, block, place)[1]
    # The compiler would not see that the remainder of a multiple of 16 is one, and read element by element.
    offset = [0 if b == -1 else at % b for at, b in zip(place, block, strict=True)]
    integers = (m, k, *place, *offset, *scale.stride(), grid_cols)
    run(kernel, programs, pointers, integers, constants, **tile.options(), **OPTIONS)


def adamw_amax(
    qdata: Tensor, scale: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, numbers: Tensor, spec: str,
    scale_block: Sequence[int], place: Sequence[int], exp_avg_scale: Tensor | None = None,
    exp_avg_sq_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See :func:`tritonfp8.reference.adamw_amax`."""
    amax = torch.zeros(amax_shape(qdata.shape, spec_of(spec).block, place), device=qdata.device)
    moments = exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale
    _launch(
        *_by_parts(qdata.shape, spec, place),
        AMAX,
        qdata,
        scale,
        moments,
        grad,
        numbers,
        None,
        amax,
        spec,
        scale_block,
        place,
        False,
    )
    return amax


def adamw(
    qdata: Tensor, scale: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, numbers: Tensor, keys: Tensor,
    spec: str, scale_block: Sequence[int], place: Sequence[int], stochastic: bool, exp_avg_scale: Tensor | None = None,
    exp_avg_sq_scale: Tensor | None = None, amax: Tensor | None = None,
) -> None:  # fmt: skip
    """See :func:`tritonfp8.reference.adamw`."""
    moments, grad = (exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale), grad.contiguous()
    if amax is None and (chosen := _by_blocks(qdata.shape, spec, place)) is not None:
        _launch(*chosen, STEP, qdata, scale, moments, grad, numbers, keys, None, spec, scale_block, place, stochastic)
        return
    if amax is None:
        amax = adamw_amax(
            qdata, scale, exp_avg, exp_avg_sq, grad, numbers, spec, scale_block, place, exp_avg_scale, exp_avg_sq_scale
        )
    amax, chosen = amax.contiguous(), _by_parts(qdata.shape, spec, place)
    _launch(*chosen, GIVEN, qdata, scale, moments, grad, numbers, keys, amax, spec, scale_block, place, stochastic)
    write_scales(scale, amax, spec, qdata.shape, scale_block, place)


_Choice = tuple[Any, int, CastTile]


def _by_blocks(shape: Sequence[int], spec: str, place: Sequence[int]) -> _Choice | None:
    """Kernel, number of programs and tile, if a program can have whole blocks."""
    (m, k), block = shape, spec_of(spec).block
    if block == TENSORWISE or any(at % b for at, b in zip(place, block, strict=True) if b != -1):
        return None
    tile = optimizer_tiles.of_blocks(block, k)
    if tile is not None:
        return kernels.adamw_kernel, tile.programs(m, k), tile
    tile = optimizer_tiles.of_parts(block)
    programs = -(-m // tile.m) if block[1] == -1 else -(-m // block[0]) * -(-k // block[1])
    return kernels.adamw_twice_kernel, programs, tile


def _by_parts(shape: Sequence[int], spec: str, place: Sequence[int]) -> _Choice:
    """The same, if blocks have parts in several programs or on several ranks."""
    block = spec_of(spec).block
    above, left = (0 if b == -1 else at % b for at, b in zip(place, block, strict=True))
    tile = optimizer_tiles.of_parts(block)
    return kernels.adamw_kernel, tile.programs(shape[0] + above, shape[1] + left), tile
