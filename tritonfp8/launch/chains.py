"""The launches of a chain of ops by one plan: see :mod:`tritonfp8.reference.chains`.

The host looks up one plan for all ops, and results that only later ops read are no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from tritonfp8 import reference
from tritonfp8.launch import casts, gemms
from tritonfp8.launch.executor import planned
from tritonfp8.launch.launcher import flat, lists_served_by
from tritonfp8.launch.plan import Planner, View
from tritonfp8.reference import Chain

_FUNCTIONS: Mapping[str, Any] = MappingProxyType(
    {name: getattr(casts, name, None) or getattr(gemms, name) for name in reference.FUNCTIONS}
)


def may_chain(op: str, args: Sequence[Any]) -> bool:
    """Whether a call of an op by these arguments, each in its place, may be a step of a chain.

    Not with MX operands, whose GEMM may be torch's, nor with batch invariance, which may copy operands first.
    """
    if op not in _FUNCTIONS or any(isinstance(x, str) and x in gemms.MX_SPECS for x in args):
        return False
    values = dict(zip(_FUNCTIONS[op].plannable.parameters, args, strict=False))
    return not values.get("batch_invariant")


def _planned_step(plan: Planner, op: str, args: tuple[Any, ...]) -> Sequence[View]:
    known = _FUNCTIONS[op].plannable if may_chain(op, args) else None
    if known is None:
        raise _NoPlanError
    values = dict(zip(known.parameters, known.completed(args), strict=True))
    tensors, options = ([values.get(name) for name in names] for names in (known.tensors, known.options))
    found: Sequence[View] | None = known.planner(plan, *flat(tensors), *options)
    if found is None:
        raise _NoPlanError
    return found


class _NoPlanError(Exception):
    """A step of a chain has no plan."""


def plan_chain(plan: Planner, *arguments: Any) -> list[View] | None:
    """Outputs: what the chain returns. No plan if a step has none.

    Args:
        plan: the planner.
        arguments: a view of each tensor, then the text of the chain.
    """
    *views, chain = arguments

    def function_of(op: str) -> Callable[..., Sequence[View]]:
        return lambda *args: _planned_step(plan, op, args)

    try:
        return Chain.of(chain).run(views, function_of)
    except _NoPlanError:
        return None


@lists_served_by(plan_chain, reference.chain)
def chain(x: Tensor, others: Sequence[Tensor], chain: str) -> list[Tensor]:
    """Launch the twin of :func:`tritonfp8.reference.chain`."""
    results = planned(plan_chain, (x, *others), (chain,))
    if results is not None:
        return list(results)
    return Chain.of(chain).run((x, *others), _FUNCTIONS.__getitem__)
