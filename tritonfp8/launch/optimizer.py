"""Launch the optimizer step of stored weights: see :mod:`tritonfp8.kernels.optim.adamw`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tritonfp8 import reference
from tritonfp8.compat import triton_private
from tritonfp8.kernels.cast import packed as packed_kernels
from tritonfp8.kernels.optim import adamw as kernels
from tritonfp8.launch.kernel_cache import run
from tritonfp8.launch.plan import kernel_constants
from tritonfp8.specs import amax_shape, spec_of
from tritonfp8.specs.formats import FORMATS
from tritonfp8.tuning import CastTile, cast_tiles, optimizer_tiles

AMAX, GIVEN = range(2)
# Fused multiplications and additions would give other bits than the reference.
OPTIONS = {"enable_fp_fusion": False}


def _launch(
    kernel: Any, programs: int, tile: CastTile, qdata: Tensor, scale: Tensor, pointers: Sequence[Tensor | None],
    integers: Sequence[int], constants: Mapping[str, Any], spec: str, scale_block: Sequence[int],
) -> None:  # fmt: skip
    """Launch a kernel of :mod:`tritonfp8.kernels.optim.adamw`; codes, scales and sizes come before other arguments."""
    if not qdata.numel():
        return
    kind = spec_of(spec)
    constants = {
        **kernel_constants(kind, kind.block), "S_ROWS": scale_block[0], "S_COLS": scale_block[1],
        **tile.sizes(), **constants,
    }  # fmt: skip
    stored = scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
    run(kernel, programs, (qdata, stored, *pointers), (*qdata.shape, *integers), constants, **tile.options(), **OPTIONS)


def _switches(scaled: bool, stochastic: bool, even: bool, first_col: int) -> dict[str, bool]:
    """Constants of both kernels; ``first_col``: the column of the unsharded weight where the first tile begins."""
    aligned, compiled = first_col % kernels.GROUP.value == 0, not triton_private.INTERPRETING
    return {"SCALED": scaled, "STOCHASTIC": stochastic, "EVEN": even, "ALIGNED": aligned, "COMPILED": compiled}


def _launch_parts(
    mode: int, qdata: Tensor, scale: Tensor, moments: Sequence[Tensor | None], grad: Tensor, numbers: Tensor,
    keys: Tensor | None, amax: Tensor, spec: str, scale_block: Sequence[int], place: Sequence[int], stochastic: bool,
) -> None:  # fmt: skip
    """Programs that have parts of blocks: find the amaxes, or round by them."""
    block = spec_of(spec).block
    # The compiler would not see that the remainder of a multiple of 16 is one, and read element by element.
    above, left = (0 if b == -1 else at % b for at, b in zip(place, block, strict=True))
    tile = optimizer_tiles.of_parts(block)
    even = above == 0 and left == 0 and tile.holds_whole(*qdata.shape)
    _launch(
        kernels.adamw_kernel, tile.programs(qdata.shape[0] + above, qdata.shape[1] + left), tile, qdata, scale,
        (*moments, grad.contiguous(), numbers, keys, amax.view(torch.int32)),
        (*place, above, left, *scale.stride(), amax_shape(qdata.shape, block, place)[1]),
        {**_switches(moments[2] is not None, stochastic, even, place[1] - left), "MODE": mode}, spec, scale_block,
    )  # fmt: skip


def adamw_amax(
    qdata: Tensor, scale: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, numbers: Tensor, spec: str,
    scale_block: Sequence[int], place: Sequence[int], exp_avg_scale: Tensor | None = None,
    exp_avg_sq_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See :func:`tritonfp8.reference.adamw_amax`."""
    amax = torch.zeros(amax_shape(qdata.shape, spec_of(spec).block, place), device=qdata.device)
    moments = exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale
    _launch_parts(AMAX, qdata, scale, moments, grad, numbers, None, amax, spec, scale_block, place, False)
    return amax


def adamw(
    qdata: Tensor, scale: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, numbers: Tensor, keys: Tensor,
    spec: str, scale_block: Sequence[int], place: Sequence[int], stochastic: bool, exp_avg_scale: Tensor | None = None,
    exp_avg_sq_scale: Tensor | None = None, amax: Tensor | None = None,
) -> None:  # fmt: skip
    """See :func:`tritonfp8.reference.adamw`."""
    if FORMATS[spec_of(spec, packed=True).format].codes_a_byte > 1:
        # Few weights are trained in these, and the reference has the same bits on a GPU.
        reference.adamw(
            qdata, scale, exp_avg, exp_avg_sq, grad, numbers, keys, spec, scale_block, place, stochastic,
            exp_avg_scale, exp_avg_sq_scale, amax,
        )  # fmt: skip
        return
    moments, block = (exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale), spec_of(spec).block
    begins_with_block = all(at % b == 0 for at, b in zip(place, block, strict=True) if b != -1)
    blocks = optimizer_tiles.of_blocks(block, qdata.shape[1])
    if amax is None and begins_with_block and blocks is not None:
        _launch(
            kernels.adamw_blocks_kernel, blocks.programs(*qdata.shape), blocks.tile, qdata, scale,
            (*moments, grad.contiguous(), numbers, keys), (*place, *scale.stride()),
            {
                **_switches(exp_avg_scale is not None, stochastic, blocks.holds_whole(*qdata.shape), place[1]),
                "DOWN": blocks.down, "RIGHT": blocks.right,
            },
            spec, scale_block,
        )  # fmt: skip
        return
    if amax is None:
        amax = adamw_amax(
            qdata, scale, exp_avg, exp_avg_sq, grad, numbers, spec, scale_block, place, exp_avg_scale, exp_avg_sq_scale
        )
    amax = amax.contiguous()
    _launch_parts(GIVEN, qdata, scale, moments, grad, numbers, keys, amax, spec, scale_block, place, stochastic)
    reference.write_scales(scale, amax, spec, qdata.shape, scale_block, place)


def quantize_at_random(qdata: Tensor, scale: Tensor, x: Tensor, keys: Tensor, spec: str, place: Sequence[int]) -> None:
    """See :func:`tritonfp8.reference.quantize_at_random`."""
    kind, (m, k) = reference.check_packed(spec), x.shape
    if not x.numel():
        return
    tile = cast_tiles.PACKED.narrowed(k)
    run(
        packed_kernels.quantize_packed_at_random_kernel, tile.programs(m, k),
        (x.contiguous(), qdata, scale.view(torch.uint8), keys), (m, k, *place, *qdata.stride(), *scale.stride()),
        {
            **kernel_constants(kind, kind.block), "ALIGNED": place[1] % kernels.GROUP.value == 0, **tile.sizes(),
        },
        **tile.options(), **OPTIONS,
    )  # fmt: skip
