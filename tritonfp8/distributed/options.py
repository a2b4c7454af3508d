"""What the layers inside a ``with`` block are told: how shards are scaled, how many tokens each rank holds.

A block is of the thread that opens it. What it says travels with a forward: to its backward, and to its recompute where
torch checkpoints activations, also when the block has ended and on other threads.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from tritonfp8.layers import carry
from tritonfp8.specs import require, shown

SCALES = ("global", "local")


class Options(NamedTuple):
    """See :func:`scales` and :func:`token_counts`."""

    scales: str = "global"
    token_counts: tuple[int, ...] | None = None


_DEFAULT = Options()


class _Scope:
    """What one open block changes; compared by identity."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields


class _Thread(threading.local):
    # An attribute of each thread's own, and no ContextVar: compiled graphs are guarded on it, and Dynamo cannot trace
    # the other. A default of the class would not be guarded.
    def __init__(self) -> None:
        self.blocks: tuple[_Scope, ...] = ()
        self.options = _DEFAULT

    def set(self, blocks: tuple[_Scope, ...]) -> None:
        options = _DEFAULT
        for block in blocks:
            options = options._replace(**block.fields)
        self.blocks, self.options = blocks, options


_thread = _Thread()


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
        # Its own entry, wherever that is: blocks may end in another order than they began in.
        left = tuple(other for other in _thread.blocks if other is not block)
        if len(left) == len(_thread.blocks):
            raise RuntimeError(
                "a block of tritonfp8.distributed.scales or token_counts ends on another thread than it began on, and "
                "stays open there: enter and leave it on one thread"
            )
        _thread.set(left)


class _Restored:
    """The options of a forward, in force again while it is recomputed. Entered any number of times, nested too."""

    def __init__(self) -> None:
        self._options = _thread.options
        self._before: list[tuple[_Scope, ...]] = []

    def __enter__(self) -> None:
        self._before.append(_thread.blocks)
        _thread.set((_Scope(**self._options._asdict()),))

    def __exit__(self, *error: object) -> None:
        _thread.set(self._before.pop())


carry(_Restored)


@contextmanager
def scales(mode: str) -> Iterator[None]:
    """How the layers that run inside the block scale operands that are shards.

    Their backward follows, and their recompute under :mod:`torch.utils.checkpoint`, inside the block or after it. Other
    threads are not told; nor is checkpointing that is not torch's, which needs the block around backward too.

    ``"global"``, the default: each scale is that of the global tensor, so results do not depend on how many ranks share
    it but for the order of sums. Costs one small MAX all-reduce for each operand with a block that spans ranks: for
    rowwise, 4 bytes a row.

    ``"local"``: each rank scales by its own part. No collective, and no coarser a scale for any element; but the codes,
    and so the rounding errors, change with the number of ranks. Operands that are gathered keep the global scale: they
    need one.

    Raises:
        ValueError: another mode.
    """
    require("scales", mode, SCALES)
    with _set(scales=mode):
        yield


@contextmanager
def token_counts(counts: Sequence[int]) -> Iterator[None]:
    """How many tokens each rank holds, for layers inside the block whose tokens are sharded otherwise than torch would.

    A DTensor's ``Shard`` means the parts that ``torch.chunk`` makes. Ranks that hold any number of tokens of their own
    (packed sequences, say) say so here, all of them the same ``counts``; sharded token dims of that many tokens in all
    then have these parts in the layers of this package and the styles of :mod:`tritonfp8.distributed`. Other operations
    on such a DTensor that move data (``full_tensor``, ``redistribute``) do not know of it: keep to local tensors
    between the layers.

    Args:
        counts: tokens of each rank of the mesh dim on which they are sharded. For a tensor of several leading dims, of
            the one that is sharded.

    Raises:
        TypeError: something else than ints.
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
