"""What the shards of a weight send each other, byte by byte.

A weight ``[N, K]`` is sharded along N, as FSDP2 does: each of W ranks holds ``ceil(N / W)`` rows, the last ones fewer
or none. Each rank quantizes its rows by the scales of the whole weight and sends one piece of bytes; all pieces are
equally long, so that uneven shards gather like even ones.
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
class Form:
    """One way in which a GEMM reads a weight ``[N, K]``: quantized as it lies, or transposed, ``[K, N]``."""

    spec: QuantSpec
    transposed: bool

    @property
    def block(self) -> tuple[int, int]:
        """The block in the coordinates of the weight as it lies."""
        return transposed(self.spec.block) if self.transposed else self.spec.block

    @property
    def sends_scales(self) -> bool:
        """Whether scales travel in the pieces.

        One byte for each few elements is too much to reduce as float32 amaxes; all other scales follow on each rank
        from the reduced amaxes.
        """
        return SCALE_FORMATS[self.spec.scale_format].exponent_only

    def __hash__(self) -> int:
        # Of one text, in place of five fields: forms are looked up several times a weight and step.
        return hash((self.spec.args, self.transposed))


_R = TypeVar("_R")


def _remembered(method: Callable[..., _R]) -> Callable[..., _R]:
    """Work out once for each layout, form and rank what every step asks for again."""
    name = method.__name__

    @functools.wraps(method)
    def found(self: Layout, *args: Any) -> _R:
        memo = self.__dict__.setdefault("_memo", {})
        key = (name, *args)
        if key not in memo:
            memo[key] = method(self, *args)
        return memo[key]

    return found


def _lead(start: int, block: int) -> int:
    return start % block if block > 1 else 0


def forms(recipe: Recipe) -> tuple[Form, ...]:
    """The forms in which ``output`` and ``grad_input`` read the weight: one if they can share it, else two.

    None in high precision, nor where only one of the two GEMMs is quantized: the other needs the values anyway.
    """
    output, grad_input = recipe.output.rhs, recipe.grad_input.rhs
    if output is None or grad_input is None:
        return ()
    if serves_both(recipe):
        return (Form(output, False),)
    return Form(output, False), Form(grad_input, True)


@dataclass(frozen=True)
class Layout:
    """Where in the gathered bytes what lies. Compared by value: compiled graphs are guarded on it.

    Attributes:
        rows: N of the whole weight.
        cols: K.
        shards: W, the ranks that hold it.
        forms: what is sent, from :func:`forms`.
        together: whether a piece holds all forms; else one, and the bytes say nothing about which.
        within: how N and K of a larger weight, of which tensor parallelism put this one here, lie; None if it is whole.
            Blocks are those of the larger one.
    """

    rows: int
    cols: int
    shards: int
    forms: tuple[Form, ...]
    together: bool
    within: tuple[DimLayout, DimLayout] | None = None

    def start(self, dim: int) -> int:
        """Where the weight starts in the larger one."""
        segments = self.within[dim].segments if self.within is not None else ()
        return segments[0].start if segments else 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        # It never changes, and guards of compiled graphs, which copy it, compare one object at once.
        return self

    @_remembered
    def lead(self, form: Form) -> tuple[int, int]:
        """Rows and columns by which the weight starts inside a block."""
        return _lead(self.start(0), form.block[0]), _lead(self.start(1), form.block[1])

    @_remembered
    def is_split(self, form: Form, dim: int) -> bool:
        """Whether some block lies on several ranks of tensor parallelism along this dim: on all ranks alike."""
        return self.within is not None and is_split(self.within[dim], form.block[dim])

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
    def grid(self, form: Form) -> tuple[int, int]:
        """Number of blocks along N and along K that the weight lies in."""
        (rows, cols), (above, left) = form.block, self.lead(form)
        return 1 if rows == -1 else -(-(above + self.rows) // rows), 1 if cols == -1 else -(-(left + self.cols) // cols)

    @_remembered
    def blocks(self, form: Form, rank: int) -> tuple[int, int]:
        """First block along N, and number of blocks, that the rows of a rank lie in."""
        block = form.block[0]
        start, count = self.shard(rank)
        if block == -1:
            return 0, 1
        if count == 0:
            return self.grid(form)[0], 0
        start += self.lead(form)[0]
        return start // block, -(-(start + count) // block) - start // block

    @_remembered
    def reduced(self, form: Form) -> Sequence[int]:
        """The rows of the form's grid of amaxes to reduce; where scales are sent, those of blocks on several ranks."""
        if form.sends_scales and not self.is_split(form, 1):
            return _straddling(self, form)
        return range(self.grid(form)[0])

    def data_shape(self, form: Form) -> tuple[int, int]:
        """Shape of the elements in a piece, padded to the largest shard."""
        shape = (self.shard_rows, self.cols)
        return shape[::-1] if form.transposed else shape

    @_remembered
    def scale_shape(self, form: Form) -> tuple[int, int]:
        """Shape of the scales in a piece, padded likewise."""
        if not form.sends_scales:
            return 0, 0
        blocks = max(self.blocks(form, rank)[1] for rank in range(self.shards))
        shape = (blocks, self.grid(form)[1])
        return shape[::-1] if form.transposed else shape

    @_remembered
    def size(self, form: Form) -> int:
        """Bytes of one form in a piece."""
        (a, b), (c, d) = self.data_shape(form), self.scale_shape(form)
        return a * b + c * d

    @functools.cached_property
    def piece_size(self) -> int:
        """Bytes of a piece."""
        sizes = [self.size(form) for form in self.forms]
        return sum(sizes) if self.together else max(sizes)

    @_remembered
    def regions(self, form: Form) -> tuple[tuple[int, tuple[int, int]], tuple[int, tuple[int, int]]]:
        """Offset in a piece and shape of the elements, then of the scales."""
        before = self.forms[: self.forms.index(form)] if self.together else ()
        offset = sum(self.size(other) for other in before)
        data = self.data_shape(form)
        return (offset, data), (offset + data[0] * data[1], self.scale_shape(form))

    @_remembered
    def takes(self, form: Form) -> tuple[tuple[int, int], ...]:
        """Which elements of each rank's piece are its own: ``(start, length)`` along the dim that is sharded."""
        return tuple((0, self.shard(rank)[1]) for rank in range(self.shards))

    @_remembered
    def takes_of_scales(self, form: Form) -> tuple[tuple[int, int], ...]:
        """As :meth:`takes`. A block on several ranks comes from the first: they all have the same scale for it."""
        found, done = [], 0
        for rank in range(self.shards):
            first, count = self.blocks(form, rank)
            known = min(max(done - first, 0), count)
            found.append((known, count - known))
            done = max(done, first + count) if count else done
        return tuple(found)


@functools.cache
def _straddling(layout: Layout, form: Form) -> tuple[int, ...]:
    """The blocks along N that lie on more than one rank."""
    spans = [layout.blocks(form, rank) for rank in range(layout.shards)]
    ranks = Counter(block for first, count in spans for block in range(first, first + count))
    found = {block for block, count in ranks.items() if count > 1}
    if layout.is_split(form, 0):
        assert layout.within is not None
        before = layout.start(0) // form.block[0]
        found |= {block - before for block in split_blocks(layout.within[0], form.block[0])} & set(ranks)
    return tuple(sorted(found))


def write_piece(piece: Tensor, layout: Layout, form: Form, qdata: Tensor, scale: Tensor) -> None:
    """Put a quantized shard into a piece; bytes beyond a shorter shard are left alone."""
    for (offset, shape), part in zip(layout.regions(form), (qdata, scale), strict=True):
        region = piece[offset : offset + shape[0] * shape[1]].view(shape)
        if region.numel():
            part = part.view(torch.uint8)
            region[: part.shape[0], : part.shape[1]] = part


def _word(*sizes: int) -> torch.dtype:
    """The widest integers that bytes at multiples of these sizes are: torch copies them as fast as it does bytes."""
    return next(
        (d for d in (torch.int64, torch.int32, torch.int16) if not any(n % d.itemsize for n in sizes)), torch.uint8
    )


def _joined(buffer: Tensor, region: tuple[int, tuple[int, int]], axis: int, takes: Sequence[tuple[int, int]]) -> Tensor:
    """One region of all pieces, of each the ``(start, length)`` along ``axis`` that is its own."""
    offset, shape = region
    stacked = buffer[:, offset : offset + shape[0] * shape[1]].view(-1, *shape)
    if axis == 1 and min(stacked.shape) > 1 and all(take == (0, shape[1]) for take in takes):
        words = stacked.view(_word(offset, *stacked.stride()[:2], shape[1]))
        return words.transpose(0, 1).contiguous().view(shape[0], -1).view(torch.uint8)
    parts = [stacked[i].narrow(axis, *take) for i, take in enumerate(takes) if take[1]]
    # Tensor parallelism may leave a rank without rows.
    return torch.cat(parts or [stacked[0].narrow(axis, 0, 0)], axis)


def read_pieces(buffer: Tensor, layout: Layout, form: Form) -> tuple[Tensor, Tensor | None]:
    """The elements of the whole weight, and its scales where the pieces hold them.

    Args:
        buffer: uint8, ``layout.shards * layout.piece_size`` bytes.
        layout: of the pieces.
        form: which of its forms.

    Returns:
        8-bit floats ``[N, K]`` (``[K, N]`` if transposed), a view of the buffer where nothing lies between the rows;
        and scales, or None.
    """
    spec, axis = form.spec, int(form.transposed)
    data, scales = layout.regions(form)
    if not form.transposed and layout.piece_size == data[1][0] * data[1][1]:
        qdata = buffer[: layout.rows * layout.cols].view(layout.rows, layout.cols)
    else:
        pieces = buffer.view(layout.shards, layout.piece_size)
        qdata = _joined(pieces, data, axis, layout.takes(form))
    qdata = qdata.view(FORMATS[spec.format].dtype)
    if not form.sends_scales:
        return qdata, None
    scale = _joined(buffer.view(layout.shards, layout.piece_size), scales, axis, layout.takes_of_scales(form))
    return qdata, scale.view(SCALE_FORMATS[spec.scale_format].dtype)
