"""Which part of each dim of a matrix lies on this rank, and where the blocks of the global matrix begin in it.

All values are plain integers. Only the global shape decides whether a collective runs, so all ranks decide alike.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from tritonfp8.recipes import Recipe


class Interval(NamedTuple):
    """``length`` positions, beginning at ``start``."""

    start: int
    length: int


class PaddedSegment(NamedTuple):
    """``gap`` zeros, then ``length`` positions of the data."""

    gap: int
    length: int


class Mesh(NamedTuple):
    """A device mesh in plain values.

    Attributes:
        sizes: of its dims.
        here: the coordinates of a rank, usually of this one.
        groups: the name of the process group of each dim.
        counts: the positions that each rank of a mesh dim has of a sharded dim whose size is their sum. They replace
            the parts that torch.chunk would make.
    """

    sizes: tuple[int, ...]
    here: tuple[int, ...]
    groups: tuple[str, ...]
    counts: tuple[int, ...] | None = None


def plain_mesh(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]:
    """The first fields of a :class:`Mesh`.

    Raises:
        ValueError: this rank is not part of the mesh.
    """
    here = mesh.get_coordinate()
    if here is None:
        raise ValueError("this rank is not part of the device mesh of the operands")
    dims = range(mesh.ndim)
    return tuple(mesh.size(i) for i in dims), tuple(here), tuple(mesh.get_group(i).group_name for i in dims)


@dataclass(frozen=True)
class DimLayout:
    """One dim of a global matrix, and the part of it that lies here. Plain data, which a compiled graph can contain.

    Attributes:
        size: of the global dim.
        segments: the parts that lie here, in order. The rows of a flattened ``[batch, tokens]`` are several segments if
            tokens are sharded.
        groups: names of the process groups over which the dim is sharded; empty if this rank has the whole dim.
        cuts: positions inside the global dim at which a segment of some rank starts.
        alignment: a block size. After :func:`align` its blocks start at multiples of it here, too.
        padded_segments: the segments with the zeros before each; empty if no zeros are needed.
        local_size: the number of positions that lie here.
        aligned_size: the number of positions of the aligned local dim.
    """

    size: int
    segments: tuple[Interval, ...]
    groups: tuple[str, ...] = ()
    cuts: tuple[int, ...] = ()
    alignment: int = 1
    padded_segments: tuple[PaddedSegment, ...] = ()
    local_size: int = field(init=False)
    aligned_size: int = field(init=False)

    def __post_init__(self) -> None:
        here = sum(segment.length for segment in self.segments)
        object.__setattr__(self, "local_size", here)
        object.__setattr__(self, "aligned_size", here + sum(padded.gap for padded in self.padded_segments))


def aligned_to(layout: DimLayout, block: int) -> DimLayout:
    """The layout, aligned to blocks of this size; blocks of 1 and -1 (the whole dim) need no alignment."""
    needed = block > 1 and any(cut % block for cut in layout.cuts)
    return (
        replace(layout, alignment=block, padded_segments=_padded_segments(layout.segments, block)) if needed else layout
    )


def split_blocks(layout: DimLayout, block: int) -> list[int]:
    """The global blocks of this size that lie on more than one rank, in order."""
    return sorted({cut // block for cut in layout.cuts if cut % block})


def is_split(layout: DimLayout, block: int) -> bool:
    """Whether some block of this size (-1: the whole dim) lies on more than one rank."""
    return len(layout.groups) > 0 and (block == -1 or (block > 1 and len(split_blocks(layout, block)) > 0))


def splits_rounding(recipe: Recipe, k: DimLayout) -> bool:
    """Whether a recipe rounds weights in blocks along K, and one of them lies on several ranks."""
    return recipe.weights is not None and is_split(k, recipe.weights.block[1])


def local_blocks(layout: DimLayout, block: int) -> list[int]:
    """The global blocks of this size, a divisor of the alignment, that the aligned local dim holds, in its order."""
    step = max(layout.alignment, block)
    found: dict[int, None] = {}
    # By name: torch 2.11 cannot trace the unpacking of a named tuple that a constant holds.
    for segment in layout.segments:
        for whole_block in range(segment.start // step, -(-(segment.start + segment.length) // step)):
            found[whole_block] = None
    parts = step // block
    return [b * parts + i for b in found for i in range(parts)][: -(-layout.aligned_size // block)]


def _front_padded(x: Tensor, dim: int, gap: int) -> Tensor:
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [gap, 0])


def align(layout: DimLayout, x: Tensor, dim: int) -> Tensor:
    """Pad each local segment with zeros so that its first block starts at the same offset as in the global tensor."""
    if not layout.padded_segments:
        return x
    if len(layout.padded_segments) == 1:
        gap = layout.padded_segments[0].gap
        return _front_padded(x, dim, gap) if gap else x
    parts, start = [], 0
    for padded in layout.padded_segments:
        parts.append(_front_padded(x.narrow(dim, start, padded.length), dim, padded.gap))
        start += padded.length
    return torch.cat(parts, dim)


def unalign(layout: DimLayout, x: Tensor, dim: int) -> Tensor:
    """Undo :func:`align`."""
    if not layout.padded_segments:
        return x
    parts, start = [], 0
    for padded in layout.padded_segments:
        parts.append(x.narrow(dim, start + padded.gap, padded.length))
        start += padded.gap + padded.length
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _padded_segments(segments: Sequence[Interval], alignment: int) -> tuple[PaddedSegment, ...]:
    slots: dict[int, int] = {}
    end, padded_segments = 0, []
    for start, length in segments:
        for block in range(start // alignment, -(-(start + length) // alignment)):
            slots.setdefault(block, len(slots))
        begin = slots[start // alignment] * alignment + start % alignment
        padded_segments.append(PaddedSegment(begin - end, length))
        end = begin + length
    return tuple(padded_segments)


def distributed(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """A contiguous DTensor of this global shape, of this rank's part; no rank is asked whether the others agree."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    stride = tuple(strides[: len(shape)])
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def distributed_as(local: Tensor, like: Tensor) -> DTensor:
    """A DTensor that lies as ``like`` does, of this rank's part."""
    assert isinstance(like, DTensor)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def whole(size: int) -> DimLayout:
    """The layout of a dim that is not sharded."""
    return DimLayout(size, (Interval(0, size),))


def chunk(interval: Interval, parts: int, index: int) -> Interval:
    """The part of an interval that :class:`~torch.distributed.tensor.Shard` gives to a rank, as torch.chunk does."""
    step = -(-interval.length // parts)
    start = min(index * step, interval.length)
    return Interval(interval.start + start, min(step, interval.length - start))


def interval(size: int, dim: int, placements: Sequence[Placement], mesh: Mesh) -> Interval:
    """The part of a tensor dim of this global size that the rank ``mesh.here`` has."""
    found = Interval(0, size)
    each = zip(placements, mesh.sizes, mesh.here, strict=True)
    # FSDP2 shards what tensor parallelism left, by a strided placement.
    for placement, parts, index in sorted(each, key=lambda item: type(item[0]) is not Shard):
        if getattr(placement, "dim", None) == dim:
            if mesh.counts is not None and len(mesh.counts) == parts and sum(mesh.counts) == found.length == size:
                found = Interval(sum(mesh.counts[:index]), mesh.counts[index])
            else:
                found = chunk(found, parts, index)
    return found


def local_sizes(sizes: Sequence[int], placements: Sequence[Placement], mesh: Mesh) -> list[int]:
    """The local sizes, on the rank ``mesh.here``, of the first dims of a tensor with these global sizes."""
    return [interval(n, d, placements, mesh).length for d, n in enumerate(sizes)]


def _segments(sizes: Sequence[int], intervals: Sequence[Interval]) -> tuple[Interval, ...]:
    """The segments of a flattened dim, from the intervals of the dims that it was flattened from."""
    segments = [Interval(0, 1)]
    for size, (start, length) in zip(sizes, intervals, strict=True):
        if length == size:
            segments = [Interval(s.start * size, s.length * size) for s in segments]
        else:
            positions = itertools.chain.from_iterable(range(s.start, s.start + s.length) for s in segments)
            segments = [Interval(p * size + start, length) for p in positions]
    return tuple(s for s in segments if s.length)


def _everywhere(mesh: Mesh, moving: Sequence[int]) -> Iterator[Mesh]:
    """The mesh from each rank that differs from rank 0 in these mesh dims only."""
    for at in itertools.product(*(range(n) if i in moving else (0,) for i, n in enumerate(mesh.sizes))):
        yield mesh._replace(here=at)


def _moving(sizes: Sequence[int], placements: Sequence[Placement]) -> list[int]:
    """The mesh dims over which one of the first ``len(sizes)`` dims of a tensor is sharded."""
    return [i for i, p in enumerate(placements) if isinstance(p, Shard) and p.dim < len(sizes)]


def _held(sizes: Sequence[int], mesh: Mesh, placements: Sequence[Placement]) -> tuple[Interval, ...]:
    return _segments(sizes, [interval(n, d, placements, mesh) for d, n in enumerate(sizes)])


def cuts_of(sizes: Sequence[int], mesh: Mesh, placements: Sequence[Placement]) -> tuple[int, ...]:
    """The ``cuts`` of :func:`flattened`, which are the same on each rank."""
    ranks = _everywhere(mesh, _moving(sizes, placements))
    return tuple(sorted({s.start for each in ranks for s in _held(sizes, each, placements)} - {0}))


def flattened(
    sizes: Sequence[int], mesh: Mesh, placements: Sequence[Placement], cuts: tuple[int, ...] | None = None
) -> DimLayout:
    """The layout of the dim that the first dims of a DTensor, of these global sizes, flatten to.

    ``cuts`` may be passed if they are known. There is one for each segment of each rank, so layouts share them.
    """
    moving = _moving(sizes, placements)
    if not moving:
        return whole(math.prod(sizes))
    groups = tuple(mesh.groups[i] for i in moving)
    cuts = cuts_of(sizes, mesh, placements) if cuts is None else cuts
    return DimLayout(math.prod(sizes), _held(sizes, mesh, placements), groups, cuts)


# The two dims of each GEMM's operands, in the order of their specs' blocks.
_DIMS_OF_OPERANDS = (
    ("output", "lhs", ("M", "K")),
    ("output", "rhs", ("N", "K")),
    ("grad_input", "lhs", ("M", "N")),
    ("grad_input", "rhs", ("K", "N")),
    ("grad_weight", "lhs", ("N", "M")),
    ("grad_weight", "rhs", ("K", "M")),
)


def largest_blocks(recipe: Recipe) -> tuple[int, int, int]:
    """The largest scaling block of any operand, and of the rounding of weights, along M, N and K.

    It is 1 if a dim is scaled whole or not at all.
    """
    found = {"M": 1, "N": 1, "K": 1}
    for gemm, side, dims in _DIMS_OF_OPERANDS:
        spec = getattr(getattr(recipe, gemm), side)
        if spec is not None:
            for dim, block in zip(dims, spec.block, strict=True):
                found[dim] = max(found[dim], block)
    if recipe.weights is not None:
        found["K"] = max(found["K"], recipe.weights.block[1])
    return found["M"], found["N"], found["K"]
