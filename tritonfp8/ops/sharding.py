"""The sharding rules of ops as data; ``tritonfp8.distributed`` makes DTensor's rules of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Operand:
    """A tensor argument or a result of an op.

    Attributes:
        dims: one letter for each dim, such as ``MK``. Equal letters of two operands are the same dim. ``RC`` and ``CR``
            may have any number of leading dims.
        scales: for scales and amaxes, which have one entry a block: the argument with the block or the spec.
        whole: the operand's values if a dim that is one block is sharded: ``"same"`` on each rank, the ``"max"`` over
            the ranks, or None if they do not follow from the shards.
    """

    dims: str
    scales: str | None = None
    whole: str | None = "same"


@dataclass(frozen=True)
class Rule:
    """Along which dims an op may be sharded.

    Attributes:
        inputs: its tensor arguments, by name.
        outputs: its results.
        flag: name of a bool argument that transposes all but the first input, if any.
        needs: name of the tensor argument (the amax) without which a dim that is one block must not be sharded, if any.
        forbids: arguments that must be None or False if results are sums over ranks: each rank would apply them, or
            ranks would sum in an order that depends on the size of the result.
    """

    inputs: Mapping[str, Operand]
    outputs: tuple[Operand, ...]
    flag: str | None = None
    needs: str | None = None
    forbids: tuple[str, ...] = ()
