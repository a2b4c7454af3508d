"""Which part of a stream's tensors a rank of an engine has, and where it lies there: all of it follows from shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from tritonfp8.export import CheckpointFormat, Stored
from tritonfp8.rollout.names import Content, EngineName
from tritonfp8.specs.naming import listed

Span = tuple[int, int]
"""First index and length in a dim."""
Box = tuple[Span, ...]
"""A part of a tensor: a span in each dim."""
# Engines pad the rows of a vocabulary to a multiple of this.
PADDING = 64
_COLUMNS = EngineName("", ("",))


class EngineRank(NamedTuple):
    """A rank of an engine, the number of ranks, and the experts that it has; None if these follow from both."""

    rank: int
    size: int
    experts: tuple[int, ...] | None


class Piece(NamedTuple):
    """A part of a tensor of the stream, and what it becomes: ``engine[target][into] = stream[name][box]``."""

    name: str
    box: Box
    target: str
    into: Box
    is_scale: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the part of the stream's tensor."""
        return tuple(length for _, length in self.box)


def cut(x: Tensor, box: Box) -> Tensor:
    """The view of a part of a tensor."""
    for dim, (start, length) in enumerate(box):
        x = x.narrow(dim, start, length)
    return x


def pieces_of(
    target: str, shape: Sequence[int], content: Content, headers: Mapping[str, Stored], shard: EngineRank
) -> list[Piece]:
    """The pieces that fill a tensor of an engine, but the rows that pad a vocabulary.

    Args:
        target: its name in the engine.
        shape: its shape there: ``[N, ...]``, or ``[E, N, ...]`` with experts.
        content: what lies in it.
        headers: of the stream.
        shard: the rank.

    Raises:
        ValueError: the shape is neither the shape of all, nor of this rank's part along one dim.
    """
    wholes = [headers[part[min(part)]].shape for part in content.parts]
    if not content.has_experts and wholes == [tuple(shape)]:
        everything = tuple((0, n) for n in shape)
        return [Piece(content.parts[0][0], everything, target, everything)]
    local = tuple(shape)[1:] if content.has_experts else tuple(shape)
    experts = _experts(shape, len(content.parts[0]), shard) if content.has_experts else (0,)
    are_alike = all(
        headers[name].shape == whole and len(whole) == len(local) > 0 and whole[1:] == wholes[0][1:]
        for part, whole in zip(content.parts, wholes, strict=True)
        for name in part.values()
    )
    # The sizes of the parts in each dim: they lie below each other in the first, and have the others in common.
    sizes = [[whole[0] for whole in wholes], *([n] for n in wholes[0][1:])] if are_alike else []
    spans = [
        _spans(here, each, shard, _COLUMNS if dim else content.row)
        for dim, (here, each) in enumerate(zip(local, sizes, strict=are_alike))
    ]
    n_split = sum(sum(n for _, n in found) < sum(each) for found, each in zip(spans, sizes, strict=True))
    n_split += len(experts) < len(content.parts[0])
    if not (are_alike and experts and all(spans) and n_split <= 1):
        came = ", ".join(f"{listed(part.values())} {whole}" for part, whole in zip(content.parts, wholes, strict=True))
        raise ValueError(
            f"{target} of the engine has shape {tuple(shape)}: it is neither all of {came}, nor the part of rank "
            f"{shard.rank} of {shard.size} along one dim. Rows are shared where a row of names says how"
        )
    others = tuple(found[0] for found in spans[1:])
    starts = accumulate((length for _, length in spans[0]), initial=0)
    found = []
    for part, span, start in zip(content.parts, spans[0], starts, strict=False):
        for at, expert in enumerate(experts):
            into = ((start, span[1]), *((0, length) for _, length in others))
            lead = ((at, 1),) if content.has_experts else ()
            found.append(Piece(part[expert], (span, *others), target, (*lead, *into)))
    # A rank may have padding and no row.
    return [piece for piece in found if math.prod(piece.shape)]


def _experts(shape: Sequence[int], count: int, shard: EngineRank) -> tuple[int, ...]:
    """The experts of a rank, in the order of its tensor; empty if they do not fit the shape."""
    local = shape[0] if shape else 0
    if shard.experts is not None:
        return shard.experts if local == len(shard.experts) and max(shard.experts) < count else ()
    if local == count:
        return tuple(range(count))
    return tuple(range(shard.rank * local, (shard.rank + 1) * local)) if local * shard.size == count else ()


def _spans(local: int, sizes: Sequence[int], shard: EngineRank, row: EngineName | None) -> list[Span]:
    """The spans that a rank has in parts of these sizes, ``local`` indices together; empty if they do not fit."""
    total = sum(sizes)
    if local == total:
        return [(0, size) for size in sizes]
    if row is None:
        return []
    if row.padded:
        # All rows and more: no ranks share them.
        rank, size = (0, 1) if local > total else (shard.rank, shard.size)
        start = min(rank * local, total)
        return [(start, min(local, total - start))] if 0 <= local * size - total < PADDING * size else []
    copies = 1
    if row.repeated:
        # A head of keys is on `copies` ranks, one after the other, if there are more ranks than heads.
        copies = (local * shard.size - sizes[0]) // max(1, total - sizes[0])
    parts = [1, *([copies] * (len(sizes) - 1))]
    if copies < 1 or any(size * each % shard.size for size, each in zip(sizes, parts, strict=True)):
        return []
    lengths = [size * each // shard.size for size, each in zip(sizes, parts, strict=True)]
    if sum(lengths) != local or shard.size % copies:
        return []
    return [(shard.rank // each * length, length) for each, length in zip(parts, lengths, strict=True)]


def scale_piece(piece: Piece, shape: Sequence[int], row: CheckpointFormat) -> Piece:
    """The piece of the scale of codes ``[N, K]``, or of bytes of several, by the piece of the codes.

    Raises:
        ValueError: an edge of the piece lies inside of a block, which has one scale.
    """
    box, into = [], []
    # In elements of the codes: a byte may have several.
    blocks = row.spec.qdata_shape(row.spec.block)
    for block, size, (start, length), (to, _) in zip(blocks, shape, piece.box, piece.into[-2:], strict=True):
        stop = start + length
        if block == -1:
            box.append((0, 1))
            into.append((0, 1))
            continue
        if start % block or to % block or (stop % block and stop != size):
            raise ValueError(
                f"{start} to {stop} of {size} in {piece.name} {tuple(shape)} become {to} to {to + length} in "
                f"{piece.target} of this rank, and cut blocks of {block} that have one scale: use fewer ranks, or a "
                "format with a scale for each row, compressed_channel"
            )
        box.append((start // block, -(-length // block)))
        into.append((to // block, -(-length // block)))
    target = row.scale_beside(piece.target)
    return Piece(row.scale_beside(piece.name), tuple(box), target, (*piece.into[:-2], *into), is_scale=True)
