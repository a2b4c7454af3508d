"""Which bytes the ranks that share a weight send each other.

A weight ``[N, K]`` is sharded along N, as FSDP2 does: each of W ranks holds ``ceil(N / W)`` rows, the last ones fewer
or none. Each rank quantizes its rows by the scales of the whole weight and sends one rank segment of bytes. All
segments are equally long, so that uneven shards gather like even ones.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from tritonfp8.distributed.shard_layout import DimLayout, is_split, split_blocks
from tritonfp8.formats import FORMATS, SCALE_FORMATS
from tritonfp8.layers.linear import serves_both
from tritonfp8.recipes import Recipe
from tritonfp8.specs import QuantSpec, transposed


@dataclass(frozen=True)
class WeightOrientation:
    """How a GEMM reads a weight ``[N, K]``: quantized untransposed, or transposed as ``[K, N]``."""

    spec: QuantSpec
    transposed: bool

    @property
    def block(self) -> tuple[int, int]:
        """The block in the coordinates of the untransposed weight."""
        return transposed(self.spec.block) if self.transposed else self.spec.block

    @property
    def sends_scales(self) -> bool:
        """Whether scales travel in the rank segments.

        Scales of one byte for a few elements (MX) do: their amaxes, in float32, would be too many to reduce. Each rank
        computes all other scales from the reduced amaxes.
        """
        return SCALE_FORMATS[self.spec.scale_format].exponent_only

    def __hash__(self) -> int:
        # The hash of one text is faster than that of five fields, and orientations are looked up often.
        return hash((self.spec.args, self.transposed))


_R = TypeVar("_R")


def _remembered(method: Callable[..., _R]) -> Callable[..., _R]:
    """Cache a method's results in the layout, by its arguments: every step asks for them again."""
    name = method.__name__

    @functools.wraps(method)
    def found(self: ByteLayout, *args: Any) -> _R:
        memo = self.__dict__.setdefault("_memo", {})
        key = (name, *args)
        if key not in memo:
            memo[key] = method(self, *args)
        return memo[key]

    return found


def _lead(start: int, block: int) -> int:
    return start % block if block > 1 else 0


def weight_orientations(recipe: Recipe) -> tuple[WeightOrientation, ...]:
    """The orientations in which ``output`` and ``grad_input`` read the weight: one if they can share it, else two.

    None in high precision, nor where only one of the two GEMMs is quantized: the other needs the values anyway.
    """
    output, grad_input = recipe.output.rhs, recipe.grad_input.rhs
    if output is None or grad_input is None:
        return ()
    if serves_both(recipe):
        return (WeightOrientation(output, False),)
    return WeightOrientation(output, False), WeightOrientation(grad_input, True)


@dataclass(frozen=True)
class ByteLayout:
    """Where each part of a weight lies in the gathered bytes. Compared by value: compiled graphs are guarded on it.

    Attributes:
        rows: N of the whole weight.
        cols: K.
        shards: W, the ranks that hold it.
        orientations: of the recipe, from :func:`weight_orientations`.
        together: whether a rank segment holds all orientations; otherwise one, and the bytes do not say which.
        within: the layouts of N and K in a larger weight, if tensor parallelism put a part of that here; None if the
            weight is whole. Blocks are those of the larger weight.
    """

    rows: int
    cols: int
    shards: int
    orientations: tuple[WeightOrientation, ...]
    together: bool
    within: tuple[DimLayout, DimLayout] | None = None

    def start(self, dim: int) -> int:
        """The index at which the weight starts in the larger one."""
        segments = self.within[dim].segments if self.within is not None else ()
        return segments[0].start if segments else 0

    def __deepcopy__(self, memo: dict[int, Any]) -> ByteLayout:
        # It never changes. Guards of compiled graphs copy it, and compare faster if that is the same object.
        return self

    @_remembered
    def lead(self, orientation: WeightOrientation) -> tuple[int, int]:
        """Rows and columns by which the weight starts inside a block."""
        return _lead(self.start(0), orientation.block[0]), _lead(self.start(1), orientation.block[1])

    @_remembered
    def is_split(self, orientation: WeightOrientation, dim: int) -> bool:
        """Whether some block lies on several ranks of tensor parallelism along this dim; all ranks answer alike."""
        return self.within is not None and is_split(self.within[dim], orientation.block[dim])

    @property
    def shard_rows(self) -> int:
        """Rows of the largest shard."""
        return -(-self.rows // self.shards)

    @_remembered
    def shard(self, rank: int) -> tuple[int, int]:
        """First row and number of rows of a rank."""
        start = min(rank * self.shard_rows, self.rows)
        return start, min(self.shard_rows, self.rows - start)

    @_remembered
    def grid(self, orientation: WeightOrientation) -> tuple[int, int]:
        """The number of blocks along N and along K that the weight lies in."""
        (rows, cols), (above, left) = orientation.block, self.lead(orientation)
        return 1 if rows == -1 else -(-(above + self.rows) // rows), 1 if cols == -1 else -(-(left + self.cols) // cols)

    @_remembered
    def blocks(self, orientation: WeightOrientation, rank: int) -> tuple[int, int]:
        """The first block along N that the rows of a rank lie in, and the number of blocks."""
        block = orientation.block[0]
        start, count = self.shard(rank)
        if block == -1:
            return 0, 1
        if count == 0:
            return self.grid(orientation)[0], 0
        start += self.lead(orientation)[0]
        return start // block, -(-(start + count) // block) - start // block

    @_remembered
    def reduced(self, orientation: WeightOrientation) -> Sequence[int]:
        """The rows of the grid of amaxes that ranks reduce.

        Where scales are sent, these are the rows of blocks that lie on several ranks.
        """
        if orientation.sends_scales and not self.is_split(orientation, 1):
            return _straddling(self, orientation)
        return range(self.grid(orientation)[0])

    def data_shape(self, orientation: WeightOrientation) -> tuple[int, int]:
        """Shape of the elements in a segment, padded to the largest shard."""
        shape = (self.shard_rows, self.cols)
        return shape[::-1] if orientation.transposed else shape

    @_remembered
    def scale_shape(self, orientation: WeightOrientation) -> tuple[int, int]:
        """Shape of the scales in a segment, padded likewise."""
        if not orientation.sends_scales:
            return 0, 0
        blocks = max(self.blocks(orientation, rank)[1] for rank in range(self.shards))
        shape = (blocks, self.grid(orientation)[1])
        return shape[::-1] if orientation.transposed else shape

    @_remembered
    def size(self, orientation: WeightOrientation) -> int:
        """Bytes of one orientation in a segment."""
        (a, b), (c, d) = self.data_shape(orientation), self.scale_shape(orientation)
        return a * b + c * d

    @functools.cached_property
    def rank_segment_size(self) -> int:
        """Bytes of a segment."""
        sizes = [self.size(orientation) for orientation in self.orientations]
        return sum(sizes) if self.together else max(sizes)

    @_remembered
    def regions(
        self, orientation: WeightOrientation
    ) -> tuple[tuple[int, tuple[int, int]], tuple[int, tuple[int, int]]]:
        """Offset in a segment and shape of the elements, then of the scales."""
        before = self.orientations[: self.orientations.index(orientation)] if self.together else ()
        offset = sum(self.size(other) for other in before)
        data = self.data_shape(orientation)
        return (offset, data), (offset + data[0] * data[1], self.scale_shape(orientation))

    @_remembered
    def takes(self, orientation: WeightOrientation) -> tuple[tuple[int, int], ...]:
        """The elements to read from each rank's segment: ``(start, length)`` along the sharded dim."""
        return tuple((0, self.shard(rank)[1]) for rank in range(self.shards))

    @_remembered
    def takes_of_scales(self, orientation: WeightOrientation) -> tuple[tuple[int, int], ...]:
        """As :meth:`takes`, for scales. All ranks of a block send its scale; the first one's is read."""
        found, done = [], 0
        for rank in range(self.shards):
            first, count = self.blocks(orientation, rank)
            read_before = min(max(done - first, 0), count)
            found.append((read_before, count - read_before))
            done = max(done, first + count) if count else done
        return tuple(found)


@functools.cache
def _straddling(layout: ByteLayout, orientation: WeightOrientation) -> tuple[int, ...]:
    """The blocks along N that lie on more than one rank."""
    spans = [layout.blocks(orientation, rank) for rank in range(layout.shards)]
    ranks = Counter(block for first, count in spans for block in range(first, first + count))
    found = {block for block, count in ranks.items() if count > 1}
    if layout.is_split(orientation, 0):
        assert layout.within is not None
        before = layout.start(0) // orientation.block[0]
        found |= {block - before for block in split_blocks(layout.within[0], orientation.block[0])} & set(ranks)
    return tuple(sorted(found))


def write_rank_segment(
    segment: Tensor, layout: ByteLayout, orientation: WeightOrientation, qdata: Tensor, scale: Tensor
) -> None:
    """Write a quantized shard into a rank segment; a shorter shard leaves the rest of the bytes as they are."""
    for (offset, shape), part in zip(layout.regions(orientation), (qdata, scale), strict=True):
        region = segment[offset : offset + shape[0] * shape[1]].view(shape)
        if region.numel():
            part = part.view(torch.uint8)
            region[: part.shape[0], : part.shape[1]] = part


def _word(*sizes: int) -> torch.dtype:
    """The widest integer type whose size divides all of these: torch copies an element as fast as a byte."""
    return next(
        (d for d in (torch.int64, torch.int32, torch.int16) if not any(n % d.itemsize for n in sizes)), torch.uint8
    )


def _joined(buffer: Tensor, region: tuple[int, tuple[int, int]], axis: int, takes: Sequence[tuple[int, int]]) -> Tensor:
    """One region of all rank segments, joined along ``axis``: from each, the ``(start, length)`` to read."""
    offset, shape = region
    stacked = buffer[:, offset : offset + shape[0] * shape[1]].view(-1, *shape)
    if axis == 1 and min(stacked.shape) > 1 and all(take == (0, shape[1]) for take in takes):
        words = stacked.view(_word(offset, *stacked.stride()[:2], shape[1]))
        return words.transpose(0, 1).contiguous().view(shape[0], -1).view(torch.uint8)
    parts = [stacked[i].narrow(axis, *take) for i, take in enumerate(takes) if take[1]]
    # Tensor parallelism may leave a rank without rows.
    return torch.cat(parts or [stacked[0].narrow(axis, 0, 0)], axis)


def read_rank_segments(
    buffer: Tensor, layout: ByteLayout, orientation: WeightOrientation
) -> tuple[Tensor, Tensor | None]:
    """The elements of the whole weight, and its scales if the segments hold them.

    Args:
        buffer: uint8, ``layout.shards * layout.rank_segment_size`` bytes.
        layout: of the segments.
        orientation: the orientation to read.

    Returns:
        8-bit floats ``[N, K]`` (``[K, N]`` if transposed), a view of the buffer if the rows lie in it without
        gaps; and scales, or None.
    """
    spec, axis = orientation.spec, int(orientation.transposed)
    data, scales = layout.regions(orientation)
    if not orientation.transposed and layout.rank_segment_size == data[1][0] * data[1][1]:
        qdata = buffer[: layout.rows * layout.cols].view(layout.rows, layout.cols)
    else:
        segments = buffer.view(layout.shards, layout.rank_segment_size)
        qdata = _joined(segments, data, axis, layout.takes(orientation))
    qdata = qdata.view(FORMATS[spec.format].dtype)
    if not orientation.sends_scales:
        return qdata, None
    scale = _joined(
        buffer.view(layout.shards, layout.rank_segment_size), scales, axis, layout.takes_of_scales(orientation)
    )
    return qdata, scale.view(SCALE_FORMATS[spec.scale_format].dtype)
