"""How an op carries the dims of its problem, as data: DTensor's rules follow from it (``tritonfp8.distributed``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Operand:
    """A tensor argument or a result of an op.

    Attributes:
        dims: the dims of the problem that its dims carry, a letter each; those before the last two of ``RC`` and ``CR``
            stand for any number of leading dims.
        scales: name of the argument with its block or spec, if it has one entry a block and not one an element.
        whole: what a shard of a dim that is one block means for this operand: ``"same"`` on each rank, ``"max"`` over
            the ranks, or None if it cannot be told from a shard.
    """

    dims: str
    scales: str | None = None
    whole: str | None = "same"


@dataclass(frozen=True)
class Rule:
    """How an op carries the dims of its problem.

    Attributes:
        inputs: its tensor arguments, by name.
        outputs: its results.
        flag: name of a bool argument that transposes all but the first input, if any.
        needs: name of the tensor argument without which a result is None where a dim is one block, if any.
        forbids: arguments that must be None where the results are sums over ranks: each rank would apply them.
    """

    inputs: Mapping[str, Operand]
    outputs: tuple[Operand, ...]
    flag: str | None = None
    needs: str | None = None
    forbids: tuple[str, ...] = ()
