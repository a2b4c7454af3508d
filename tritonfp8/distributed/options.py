"""Options of the layers inside a ``with`` block: how shards are scaled, how many tokens each rank has.

A block applies to the thread that opens it. Its options travel with a forward to the backward and, with activation
checkpointing by torch, to the recompute: also after the block has ended, and on other threads.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from tritonfp8.specs.checks import require, shown

SCALES = ("global", "local")


class Options(NamedTuple):
    """See :func:`scales` and :func:`token_counts`."""

    scales: str = "global"
    token_counts: tuple[int, ...] | None = None


_DEFAULT = Options()


class _Scope:
    """The options that one open block sets; compared by identity."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields


class _ThreadOptions(threading.local):
    # A thread-local attribute and not a ContextVar, which Dynamo cannot trace: compiled graphs are guarded on it. A
    # default on the class would not be guarded, so __init__ sets it.
    def __init__(self) -> None:
        self.blocks: tuple[_Scope, ...] = ()
        self.options = _DEFAULT

    def set(self, blocks: tuple[_Scope, ...]) -> None:
        options = _DEFAULT
        for block in blocks:
            options = options._replace(**block.fields)
        self.blocks, self.options = blocks, options


_thread = _ThreadOptions()


def current() -> Options:
    """The options of the innermost blocks of this thread."""
    return _thread.options


@contextmanager
def _set(**fields: Any) -> Iterator[None]:
    block = _Scope(**fields)
    _thread.set((*_thread.blocks, block))
    try:
        yield
    finally:
        # Blocks may end in another order than they began in, so this removes its own entry.
        left = tuple(other for other in _thread.blocks if other is not block)
        if len(left) == len(_thread.blocks):
            raise RuntimeError(
                "a block of tritonfp8.distributed.scales or token_counts ends on another thread than it began on, and "
                "stays open there: enter and leave it on one thread"
            )
        _thread.set(left)


class Restored:
    """The options of a forward, for its recompute. It can be entered any number of times, also nested."""

    def __init__(self) -> None:
        self._options = _thread.options
        self._before: list[tuple[_Scope, ...]] = []

    def __enter__(self) -> None:
        self._before.append(_thread.blocks)
        _thread.set((_Scope(**self._options._asdict()),))

    def __exit__(self, *error: object) -> None:
        _thread.set(self._before.pop())


@contextmanager
def scales(mode: str) -> Iterator[None]:
    """How the layers that run inside the block scale operands that are shards.

    Their backward follows the same mode, and so does a recompute by :mod:`torch.utils.checkpoint`, inside the block or
    after it. Other threads do not. Checkpointing by other libraries needs the block around backward, too.

    ``"global"``, the default: each scale comes from the global tensor. The number of ranks then changes only the order
    of sums. It costs one small MAX all-reduce for each operand with a block that spans ranks: for rowwise, 4 bytes a
    row.

    ``"local"``: each rank scales its own part. It needs no collective, and no scale gets coarser. But the quantized
    values, and so the rounding errors, change with the number of ranks. Gathered operands keep global scales.

    Raises:
        ValueError: another mode.
    """
    require("scales", mode, SCALES)
    with _set(scales=mode):
        yield


@contextmanager
def token_counts(counts: Sequence[int]) -> Iterator[None]:
    """The tokens of each rank, for layers inside the block whose tokens are not sharded as torch.chunk does.

    A DTensor's ``Shard`` means the parts that ``torch.chunk`` makes. Ranks with other numbers of tokens (packed
    sequences, for example) set them here, all ranks the same ``counts``. A sharded token dim of ``sum(counts)`` tokens
    then has these parts in the layers of this package and in the styles of :mod:`tritonfp8.distributed`. Other
    operations that move the data of such a DTensor (``full_tensor``, ``redistribute``) do not know the counts: use
    local tensors between the layers.

    Args:
        counts: the tokens of each rank of the mesh dim on which they are sharded. If the tensor has several leading
            dims, the sizes of the sharded one.

    Raises:
        TypeError: a count that is no int.
        ValueError: a negative count.
    """
    try:
        if isinstance(counts, str | bytes) or not isinstance(counts, Sequence):
            raise TypeError(type(counts))
        found = tuple(operator.index(count) for count in counts)
    except TypeError as error:
        raise TypeError(
            f"token counts must be a sequence of ints, one for each rank of the mesh dim; got {shown(counts)}"
        ) from error
    if any(count < 0 for count in found):
        raise ValueError(f"token counts must not be negative; got {found}")
    with _set(token_counts=found):
        yield
