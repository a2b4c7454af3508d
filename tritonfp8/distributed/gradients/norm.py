"""The norm of gradients by sums whose bits depend on no shard: of each row in integers, then of all rows in pairs.

A row is the last dim, or one element of a vector. FSDP2 shards dim 0, so a row lies on one rank. The sum of its squares
is of integers, in steps of 2^-40 of a power of two near the largest square: equal in every order. These sums are
gathered in the order of rows, and added as a balanced tree.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tritonfp8.distributed.collectives import all_gather_each

# Elements whose squares are in memory at once, as 64-bit integers.
_AT_ONCE = 1 << 24
# Bits behind the point, and the longest row whose sum of squares, each below 4, fits an int64.
_BITS, _LONGEST = 40, 1 << 21
# As torch.nn.utils.clip_grad_norm_ has it.
_EPS = 1e-6


def _squares(x: Tensor) -> Tensor:
    """The sum of squares of each row of ``x [rows, K]``, float64."""
    x = x.float()
    largest = x.abs().amax(1, keepdim=True)
    exponent = (largest.view(torch.int32) >> 23).clamp(1, 253)
    scaled = x * (254 - exponent << 23).view(torch.float32)
    total = (scaled * scaled * 2.0**_BITS).long().sum(1).double()
    found = torch.ldexp(total, 2 * (exponent[:, 0] - 127).double() - _BITS)
    return torch.where(largest[:, 0].isfinite(), found, largest[:, 0].double())


def sums_of_squares(x: Tensor) -> Tensor:
    """The sum of squares of each row of a gradient or of a shard of it, float64 ``[rows]``."""
    rows = x.reshape(-1, x.shape[-1] if x.ndim > 1 else 1)
    if not rows.numel():
        return x.new_zeros(len(rows), dtype=torch.float64)
    # A longer row is cut into rows of this length and a rest, which does not depend on the number of rows.
    parts = rows.split(_LONGEST, 1)
    step = max(1, _AT_ONCE // parts[0].shape[1])
    return functools.reduce(torch.add, (torch.cat([_squares(some) for some in part.split(step)]) for part in parts))


def in_pairs(x: Tensor) -> Tensor:
    """The sum of ``x [n]``: neighbours, then neighbouring sums, and so on; an odd last one waits."""
    while len(x) > 1:
        pairs = x[: len(x) // 2 * 2].view(-1, 2)
        x = torch.cat([pairs[:, 0] + pairs[:, 1], x[len(pairs) * 2 :]])
    return x.sum()


def _sharded_over(grad: Tensor) -> tuple[DeviceMesh, int] | None:
    """The mesh and the mesh dim over which rows are sharded; None if every rank has all of them.

    Raises:
        ValueError: sharded along another dim, or over several mesh dims.
    """
    if not isinstance(grad, DTensor):
        return None
    sharded = [i for i, placement in enumerate(grad.placements) if not isinstance(placement, Replicate)]
    if not sharded:
        return None
    if len(sharded) > 1 or grad.placements[sharded[0]] != Shard(0):
        raise ValueError(
            "a norm that does not depend on the shards is of gradients sharded along dim 0 over one mesh dim; got "
            f"placements {grad.placements}: use torch.nn.utils.clip_grad_norm_"
        )
    return grad.device_mesh, sharded[0]


def _rows_of_ranks(grad: Tensor, ranks: int) -> list[int]:
    """The rows that each rank has of a gradient sharded along dim 0, as ``torch.chunk`` does."""
    inner = math.prod(grad.shape[1:-1])
    size = -(-grad.shape[0] // ranks)
    return [max(0, min(size, grad.shape[0] - size * rank)) * inner for rank in range(ranks)]


def _gathered(grads: Sequence[Tensor], sums: Sequence[Tensor], mesh: DeviceMesh, dim: int) -> list[Tensor]:
    """Of each gradient the sums of all its rows in order, from the sums of the rows of this rank."""
    rows = [_rows_of_ranks(grad, mesh.size(dim)) for grad in grads]
    shapes = [(sum(counts),) for counts in zip(*rows, strict=True)]
    parts = all_gather_each(torch.cat(list(sums)), shapes, mesh.get_group(dim).group_name)
    by_rank = [part.split(list(counts)) for part, counts in zip(parts, zip(*rows, strict=True), strict=True)]
    return [torch.cat(each) for each in zip(*by_rank, strict=True)]


def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Clip gradients by their norm, as torch does; the norm has the bits of unsharded gradients.

    torch's own adds in an order that depends on the shards. Here each row is summed in integers, one all-gather brings
    8 bytes a row to all ranks, and rows are added in pairs.

    Args:
        parameters: in the same order on all ranks. Gradients are plain, or DTensors that are sharded along dim 0 over
            one mesh dim, as FSDP2 and HSDP do.
        max_norm: the largest norm that is left as it is.

    Returns:
        The norm before, float32 without dims. A gradient that is not finite makes it so.

    Raises:
        ValueError: gradients that are sharded in another way, or a negative ``max_norm``.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm must not be negative; got {max_norm}")
    grads = [p.grad for p in ([parameters] if isinstance(parameters, Tensor) else parameters) if p.grad is not None]
    local = [grad._local_tensor if isinstance(grad, DTensor) else grad for grad in grads]
    if not grads:
        return torch.zeros(())
    sums = [sums_of_squares(each) for each in local]
    places = [_sharded_over(grad) for grad in grads]
    by_place = sorted(range(len(grads)), key=lambda i: [*dict.fromkeys(places)].index(places[i]))
    for place, group in itertools.groupby(by_place, key=lambda i: places[i]):
        if place is not None:
            some = list(group)
            whole = _gathered([grads[i] for i in some], [sums[i] for i in some], *place)
            for i, each in zip(some, whole, strict=True):
                sums[i] = each
    norm = in_pairs(torch.cat(sums)).sqrt().float()
    torch._foreach_mul_(local, (max_norm / (norm + _EPS)).clamp(max=1.0))
    return norm
