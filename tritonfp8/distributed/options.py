"""What the layers inside a ``with`` block are told: how shards are scaled, how many tokens each rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tritonfp8.specs import require

SCALES = ("global", "local")


class Options(NamedTuple):
    """See :func:`scales` and :func:`token_counts`."""

    scales: str = "global"
    token_counts: tuple[int, ...] | None = None


_options = Options()


def current() -> Options:
    """The options of the innermost blocks."""
    return _options


@contextmanager
def _set(options: Options) -> Iterator[None]:
    global _options
    before, _options = _options, options
    try:
        yield
    finally:
        _options = before


@contextmanager
def scales(mode: str) -> Iterator[None]:
    """How the layers that run inside the block (forward; their backward follows) scale operands that are shards.

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
    with _set(_options._replace(scales=mode)):
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
        ValueError: a negative count.
    """
    if any(count < 0 for count in counts):
        raise ValueError(f"token counts must not be negative; got {tuple(counts)}")
    with _set(_options._replace(token_counts=tuple(counts))):
        yield
