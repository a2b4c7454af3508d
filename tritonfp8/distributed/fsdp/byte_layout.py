"""Which bytes the ranks that share a weight send each other.

A weight ``[N, K]`` of a linear layer is sharded along N, as FSDP2 does: each of W ranks holds ``ceil(N / W)`` rows, the
last ones fewer or none. Each rank quantizes its rows by the scales of the whole weight and sends one rank segment of
bytes. All segments are equally long, so that uneven shards gather like even ones.

A weight ``[E, N, K]`` of experts is sharded over E, so each rank holds whole experts, ``ceil(E / W)``, the last ranks
fewer or none. An expert has scales of its own, so a rank quantizes its experts without a reduction. It sends codes and,
beside them, scales, so that nothing is copied where the codes are read.

Both layouts have the same interface. They are compared by value: compiled graphs are guarded on them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonfp8 import ops
from tritonfp8.distributed.fsdp.orientations import WeightOrientation
from tritonfp8.distributed.fsdp.shard_casts import ShardPlace, quantize_shard
from tritonfp8.distributed.shard_layout import DimLayout, is_split, split_blocks
from tritonfp8.specs import empty_grouped_scale, grouped_scale_shape
from tritonfp8.specs.formats import FORMATS, SCALE_FORMATS


class GatheredBytes(NamedTuple):
    """The tensors of a gathered weight.

    Attributes:
        codes: uint8, flat: the rank segments of all ranks, or the codes of all experts.
        codes_t: of experts, the codes of the second orientation if the bytes hold both.
        scale, scale_t: of rows, the scales of the untransposed and the transposed weight where they do not come with
            the bytes; of experts, ``scale`` has the bytes of all scales.
    """

    codes: Tensor
    codes_t: Tensor | None = None
    scale: Tensor | None = None
    scale_t: Tensor | None = None


class _Region(NamedTuple):
    """A part of each rank segment: elements, or scales; and ``(start, length)`` to read of it along the rows."""

    offset: int
    shape: tuple[int, int]
    takes: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]


class _Layout:
    """The interface of both layouts."""

    orientations: tuple[WeightOrientation, ...]
    together: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> _Layout:
        # It never changes. Guards of compiled graphs copy it, and compare faster if that is the same object.
        return self

    def contents(self, content: int | None) -> tuple[int, ...]:
        """The indices of the orientations in the bytes; ``content`` is the index of the one, None if they hold all."""
        return tuple(range(len(self.orientations))) if content is None else (content,)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight on the ranks that gather it."""
        raise NotImplementedError

    def pack(
        self, shard: Tensor, wanted: tuple[int, ...], rank: int = 0, reduced: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        """The bytes that a rank sends, flat uint8, as long on each rank.

        Args:
            shard: in the dtype that the weight is quantized from; it may have no rows and no experts.
            wanted: indices of the orientations.
            rank: which shard it is.
            reduced: the reduced amaxes of all orientations; of experts, none.
        """
        raise NotImplementedError

    def joined(self, gathered: Sequence[Tensor], scales: Sequence[Tensor | None]) -> GatheredBytes:
        """What :meth:`pack` returned on all ranks, each joined; and the scales that ranks computed."""
        raise NotImplementedError

    def read(self, given: GatheredBytes, index: int, content: int | None) -> tuple[Tensor, Tensor]:
        """``(qdata, scale)`` of the orientation with this index, for the whole weight.

        Args:
            given: the tensors of all ranks.
            index: the orientation to read.
            content: see :meth:`contents`.

        Returns:
            8-bit floats and scales as the orientation is; views of the bytes if the rows lie in them without gaps.
        """
        raise NotImplementedError


def _blocks(start: int, count: int, block: int) -> tuple[int, int]:
    """The first block that positions lie in, and the number of blocks."""
    if block == -1:
        return 0, 1
    return start // block, -(-(start + count) // block) - start // block


@dataclass(frozen=True)
class ByteLayout(_Layout):
    """Where each part of a weight of rows lies in the gathered bytes.

    Attributes:
        rows: N of the whole weight.
        cols: K.
        shards: W, the ranks that hold it.
        orientations: of the recipe, from :func:`~.orientations.weight_orientations`.
        together: whether a rank segment holds all orientations; otherwise one, and the bytes do not say which.
        within: the layouts of N and K in a larger weight, if tensor parallelism put a part of that here; None if the
            weight is whole. Blocks begin where blocks of the larger weight do.
    """

    rows: int
    cols: int
    shards: int
    orientations: tuple[WeightOrientation, ...]
    together: bool
    within: tuple[DimLayout, DimLayout] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """``[N, K]``."""
        return self.rows, self.cols

    def start(self, dim: int) -> int:
        """The index at which the weight starts in the larger one."""
        segments = self.within[dim].segments if self.within is not None else ()
        return segments[0].start if segments else 0

    def lead(self, orientation: WeightOrientation) -> tuple[int, int]:
        """Rows and columns by which the weight starts inside a block."""
        rows, cols = (self.start(dim) % block if block > 1 else 0 for dim, block in enumerate(orientation.block))
        return rows, cols

    def is_split(self, orientation: WeightOrientation, dim: int) -> bool:
        """Whether some block lies on several ranks of tensor parallelism along this dim; all ranks answer alike."""
        return self.within is not None and is_split(self.within[dim], orientation.block[dim])

    @property
    def shard_rows(self) -> int:
        """Rows of the largest shard."""
        return -(-self.rows // self.shards)

    def shard(self, rank: int) -> tuple[int, int]:
        """First row and number of rows of a rank."""
        start = min(rank * self.shard_rows, self.rows)
        return start, min(self.shard_rows, self.rows - start)

    def extent(self, orientation: WeightOrientation) -> tuple[int, int]:
        """N and K from the beginning of the first block."""
        above, left = self.lead(orientation)
        return above + self.rows, left + self.cols

    def grid(self, orientation: WeightOrientation) -> tuple[int, int]:
        """The number of blocks along N and along K that the weight lies in."""
        sizes = zip(self.extent(orientation), orientation.block, strict=True)
        rows, cols = (1 if block == -1 else -(-size // block) for size, block in sizes)
        return rows, cols

    def blocks(self, orientation: WeightOrientation, rank: int) -> tuple[int, int]:
        """The first block along N that the rows of a rank lie in, and the number of blocks."""
        start, count = self.shard(rank)
        if count == 0 and orientation.block[0] != -1:
            return self.grid(orientation)[0], 0
        return _blocks(start + self.lead(orientation)[0], count, orientation.block[0])

    def reduced(self, orientation: WeightOrientation) -> Sequence[int]:
        """The rows of the grid of amaxes that ranks reduce.

        Where scales are sent, these are the rows of blocks that lie on several ranks.
        """
        if not orientation.sends_scales or self.is_split(orientation, 1):
            return range(self.grid(orientation)[0])
        spans = [self.blocks(orientation, rank) for rank in range(self.shards)]
        ranks = Counter(block for first, count in spans for block in range(first, first + count))
        found = {block for block, count in ranks.items() if count > 1}
        if self.is_split(orientation, 0):
            assert self.within is not None
            before = self.start(0) // orientation.block[0]
            found |= {block - before for block in split_blocks(self.within[0], orientation.block[0])} & set(ranks)
        return tuple(sorted(found))

    def place(self, orientation: WeightOrientation, rank: int) -> ShardPlace:
        """Where the shard of a rank lies."""
        (start, rows), lead, reduced = self.shard(rank), self.lead(orientation), self.reduced(orientation)
        above = (start + lead[0]) % orientation.block[0] if orientation.block[0] > 1 else 0
        some = None if isinstance(reduced, range) else tuple(reduced)
        return ShardPlace(orientation, start, rows, lead, (above, lead[1]), *self.blocks(orientation, rank), some)

    @cached_property
    def _places(self) -> dict[int, tuple[ShardPlace, ...]]:
        return {}

    def places(self, rank: int) -> tuple[ShardPlace, ...]:
        """Where the shard of a rank lies in each orientation, found once: every step asks for it."""
        if rank not in self._places:
            self._places[rank] = tuple(self.place(orientation, rank) for orientation in self.orientations)
        return self._places[rank]

    @cached_property
    def regions(self) -> tuple[tuple[_Region, _Region | None], ...]:
        """The elements, and the scales if they are sent, of each orientation in a rank segment."""
        found, offset = [], 0
        for orientation in self.orientations:
            counts = tuple((0, self.shard(rank)[1]) for rank in range(self.shards))
            offset = offset if self.together else 0
            data, scales = _Region(offset, orientation.shape(self.shard_rows, self.cols), counts), None
            offset += data.size
            if orientation.sends_scales:
                most = max(self.blocks(orientation, rank)[1] for rank in range(self.shards))
                shape = orientation.shape(most, self.grid(orientation)[1])
                scales = _Region(offset, shape, self._takes_of_scales(orientation))
                offset += scales.size
            found.append((data, scales))
        return tuple(found)

    def _takes_of_scales(self, orientation: WeightOrientation) -> tuple[tuple[int, int], ...]:
        """All ranks of a block send its scale; the first one's is read."""
        found, done = [], 0
        for rank in range(self.shards):
            first, count = self.blocks(orientation, rank)
            read_before = min(max(done - first, 0), count)
            found.append((read_before, count - read_before))
            done = max(done, first + count) if count else done
        return tuple(found)

    @cached_property
    def rank_segment_size(self) -> int:
        """Bytes of a segment."""
        sizes = [data.size + (scales.size if scales else 0) for data, scales in self.regions]
        return sum(sizes) if self.together else max(sizes)

    def pack(
        self, shard: Tensor, wanted: tuple[int, ...], rank: int = 0, reduced: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        """One rank segment. ``shard [n, K]``; ``reduced`` has ``[len(self.reduced(o)), K blocks]`` of each one."""
        parts = []
        if shard.shape[0]:
            places = self.places(rank)
            parts = [(i, *quantize_shard(shard, places[i], reduced[i])) for i in wanted]
        if len(parts) == 1 and parts[0][1].numel() == self.rank_segment_size:
            return (parts[0][1].view(torch.uint8).reshape(-1),)
        segment = torch.zeros(self.rank_segment_size, dtype=torch.uint8, device=shard.device)
        for index, qdata, scale in parts:
            self.write(segment, index, qdata, scale)
        return (segment,)

    def write(self, segment: Tensor, index: int, qdata: Tensor, scale: Tensor) -> None:
        """Write a quantized shard into a rank segment; a shorter shard leaves the rest of the bytes as they are."""
        for region, part in zip(self.regions[index], (qdata, scale), strict=True):
            if region is not None:
                place = segment[region.offset : region.offset + region.shape[0] * region.shape[1]].view(region.shape)
                part = part.view(torch.uint8)
                place[: part.shape[0], : part.shape[1]] = part

    def joined(self, gathered: Sequence[Tensor], scales: Sequence[Tensor | None]) -> GatheredBytes:
        """The rank segments, and the scales that do not come with them."""
        return GatheredBytes(gathered[0], None, *scales)

    def read(self, given: GatheredBytes, index: int, content: int | None) -> tuple[Tensor, Tensor]:
        """See :class:`_Layout`. ``qdata`` is ``[N, K]``, or ``[K, N]`` if transposed."""
        orientation, (data, scales) = self.orientations[index], self.regions[index]
        spec, size, codes = orientation.spec, self.rank_segment_size, given.codes
        if not orientation.transposed and size == data.shape[0] * data.shape[1]:
            qdata = codes[: self.rows * self.cols].view(self.rows, self.cols)
        else:
            qdata = _join(codes.view(self.shards, size), data, orientation.transposed)
        if scales is None:
            scale = given.scale_t if orientation.transposed else given.scale
            assert scale is not None
        else:
            scale = _join(codes.view(self.shards, size), scales, orientation.transposed)
            scale = scale.view(SCALE_FORMATS[spec.scale_format].dtype)
        return qdata.view(FORMATS[spec.format].dtype), scale


def _join(segments: Tensor, region: _Region, transposed: bool) -> Tensor:
    """One region of all rank segments, joined along the rows of the untransposed weight."""
    offset, shape, takes = region
    axis = int(transposed)
    stacked = segments[:, offset : offset + shape[0] * shape[1]].view(-1, *shape)
    if transposed and min(stacked.shape) > 1 and all(take == (0, shape[1]) for take in takes):
        # The widest integer type whose size divides all of these: torch copies an element as fast as a byte.
        sizes = offset, *stacked.stride()[:2], shape[1]
        wide = [d for d in (torch.int64, torch.int32, torch.int16) if not any(n % d.itemsize for n in sizes)]
        words = stacked.view((*wide, torch.uint8)[0])
        return words.transpose(0, 1).contiguous().view(shape[0], -1).view(torch.uint8)
    parts = [stacked[i].narrow(axis, *take) for i, take in enumerate(takes) if take[1]]
    # Tensor parallelism may leave a rank without rows.
    return torch.cat(parts or [stacked[0].narrow(axis, 0, 0)], axis)


@dataclass(frozen=True)
class MatricesLayout(_Layout):
    """Where each part of a weight of experts lies in the gathered bytes.

    Attributes:
        experts, rows, cols: the shape of the parameter before it is sharded.
        shards: W, the ranks that hold it.
        orientations: how the GEMMs read the matrices of the parameter.
        together: whether the bytes hold all orientations; otherwise one, and they do not say which.
    """

    experts: int
    rows: int
    cols: int
    shards: int
    orientations: tuple[WeightOrientation, ...]
    together: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """``[E, N, K]``."""
        return self.experts, self.rows, self.cols

    @property
    def shard_experts(self) -> int:
        """Experts of the largest shard."""
        return -(-self.experts // self.shards)

    @cached_property
    def _scale_shapes(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """For each orientation the shape of the scales of a rank, and their bytes."""
        found = []
        for o in self.orientations:
            matrices = self.shard_experts, *o.shape(self.rows, self.cols)
            shape = grouped_scale_shape(matrices, o.spec.block, "matrices", self.shard_experts)
            found.append((shape, math.prod(shape) * SCALE_FORMATS[o.spec.scale_format].dtype.itemsize))
        return tuple(found)

    @cached_property
    def scales_size(self) -> int:
        """Bytes of scales that a rank sends, whichever orientations it sends."""
        sizes = [size for _, size in self._scale_shapes]
        return sum(sizes) if self.together else max(sizes)

    def pack(
        self, shard: Tensor, wanted: tuple[int, ...], rank: int = 0, reduced: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        """Codes ``[e, N, K]`` of each orientation, then all scales; nothing of ``rank`` and ``reduced`` is read."""
        scales = torch.zeros(self.scales_size, dtype=torch.uint8, device=shard.device)
        found, start = [], 0
        missing = (self.shard_experts - len(shard)) * self.rows * self.cols
        for i in wanted:
            orientation = self.orientations[i]
            codes = torch.zeros(0, dtype=torch.uint8, device=shard.device)
            if len(shard):
                qdata, scale = ops.quantize_matrices(shard, *orientation.spec.args, orientation.transposed)
                codes = qdata.view(torch.uint8).flatten()
                own = scale.contiguous().view(torch.uint8).flatten()
                scales[start : start + len(own)].copy_(own)
            start += self._scale_shapes[i][1]
            found.append(torch.cat([codes, codes.new_zeros(missing)]) if missing else codes)
        return (*found, scales)

    def joined(self, gathered: Sequence[Tensor], scales: Sequence[Tensor | None]) -> GatheredBytes:
        """Codes of one orientation or of both, and all scales."""
        *codes, sent = gathered
        return GatheredBytes(codes[0], codes[1] if len(codes) > 1 else None, sent)

    def read(self, given: GatheredBytes, index: int, content: int | None) -> tuple[Tensor, Tensor]:
        """See :class:`_Layout`. ``qdata`` is ``[E, N, K]``, or ``[E, K, N]`` if transposed."""
        orientation, before = self.orientations[index], [i for i in self.contents(content) if i < index]
        codes = given.codes_t if index and self.together else given.codes
        assert codes is not None
        assert given.scale is not None
        spec, shape = orientation.spec, orientation.shape(self.rows, self.cols)
        qdata = codes.view(FORMATS[spec.format].dtype).view(-1, *shape)[: self.experts]
        (_, *rest), size = self._scale_shapes[index]
        start = sum(self._scale_shapes[i][1] for i in before)
        own = given.scale.view(self.shards, self.scales_size)[:, start : start + size].contiguous()
        scale = empty_grouped_scale((self.experts, *shape), spec, "matrices", self.experts, codes.device)
        scale.copy_(own.flatten().view(SCALE_FORMATS[spec.scale_format].dtype).view(-1, *rest)[: self.experts])
        return qdata, scale
