"""DTensor's rules for the ops of this package, made from the rows of :data:`tritonfp8.ops.OPS`.

The rules serve ops that are called on DTensors (``tritonfp8.quantize(dtensor, spec)``). Where a rule does not allow a
shard, DTensor replicates the operand first. So values are right for every placement, and a tensor whose blocks span
ranks is gathered before it is quantized. Two limits are torch's: it cannot gather uneven shards of e8m0 scales (it pads
them with zeros, which e8m0 lacks), and its MAX of floats over ranks may drop a NaN. Linear layers use
:mod:`tritonfp8.distributed.tensor_parallel.linear` instead, which needs neither.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement

from tritonfp8 import ops
from tritonfp8.ops import OPS, Operand, Rule
from tritonfp8.specs import full_block, spec_of

RULES: Mapping[str, Rule] = MappingProxyType({name: op.sharding for name, op in OPS.items() if op.sharding is not None})


def _dims(operand: Operand, ndim: int, transpose: bool) -> str:
    """The letters of the dims of an operand that has ``ndim`` dims."""
    dims = operand.dims[::-1] if transpose else operand.dims
    if "R" not in dims:
        return dims
    return dims[-1] if ndim == 1 else string.ascii_lowercase[: ndim - 2] + dims


def _block(value: str | Sequence[int]) -> Sequence[int]:
    return spec_of(value, packed=True).block if isinstance(value, str) else value


def _placement(operand: Operand, dims: str, letter: str, given: Mapping[str, Any]) -> Placement | None:
    """The placement of an operand if the dim ``letter`` is sharded; None if a block spans ranks."""
    if letter not in dims:
        return Replicate()
    at = dims.index(letter)
    block = 1 if operand.scales is None else full_block(len(dims), _block(given[operand.scales]))[at]
    if block == 1:
        return Shard(at)
    wholes: dict[str | None, Placement] = {"same": Replicate(), "max": Partial("max")}
    return wholes.get(operand.whole) if block == -1 else None


def placements_where_sharded(
    name: str, letter: str, given: Mapping[str, Any]
) -> tuple[list[Placement], list[Placement | None]] | None:
    """The placements of the results and arguments of an op if one dim is sharded.

    Args:
        name: of the op.
        letter: of the dim.
        given: the arguments of a call by name, in order; in place of a tensor, anything with ``ndim``.

    Returns:
        ``(results, arguments)``, None for arguments that are no tensors; or None if the op does not allow it.
    """
    rule = RULES[name]
    ndim = given[next(iter(rule.inputs))].ndim
    flipped = bool(rule.flag and given.get(rule.flag, False))
    inputs: list[Placement | None] = []
    for i, (argument, value) in enumerate((a, v) for a, v in given.items()):
        operand = rule.inputs.get(argument)
        if operand is None or value is None:
            inputs.append(None)
            continue
        placement = _placement(operand, _dims(operand, ndim, flipped and i > 0), letter, given)
        if placement is None:
            return None
        inputs.append(placement)
    outputs: list[Placement] = []
    for operand in rule.outputs:
        dims = _dims(operand, ndim, flipped)
        placement = _placement(operand, dims, letter, given)
        if letter not in dims:
            placement = (
                None
                if any(given.get(a) is not None and given[a] is not False for a in rule.forbids)
                else Partial("sum")
            )
        if operand.scales and rule.needs and given.get(rule.needs) is None and placement == Replicate():
            placement = None
        if placement is None:
            return None
        outputs.append(placement)
    return outputs, inputs


def letters(name: str, given: Mapping[str, Any]) -> str:
    """The letters of all dims of a call."""
    rule = RULES[name]
    ndim = given[next(iter(rule.inputs))].ndim
    return "".join(dict.fromkeys("".join(_dims(operand, ndim, False) for operand in rule.inputs.values())))


def _strategy(name: str) -> Callable[..., Any]:
    arguments = [argument.name for argument in getattr(ops, name)._schema.arguments]

    def rule(*args: Any, **kwargs: Any) -> list[tuple[list[Placement], list[Placement | None]]]:
        given = {**dict(zip(arguments, args, strict=False)), **kwargs}
        whole: list[Placement | None] = [Replicate() if a in RULES[name].inputs and v is not None else None
                                         for a, v in given.items()]  # fmt: skip
        acceptable: list[tuple[list[Placement], list[Placement | None]]] = [
            ([Replicate()] * len(RULES[name].outputs), whole)
        ]
        for letter in letters(name, given):
            if found := placements_where_sharded(name, letter, given):
                acceptable.append(found)
        return acceptable

    return rule


def register() -> None:
    """Register the rules with DTensor."""
    for name in RULES:
        op: torch._ops.OpOverload = getattr(ops, name)
        register_sharding(op)(_strategy(name))
        # DTensor caches the answers of a rule by the arguments of the call. register_sharding names only tensors and
        # ints to it, so without this one block would get the answer for another.
        known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
        plain = [argument.name for argument in op._schema.arguments if argument.name not in RULES[name].inputs]
        known[op] = replace(known[op], static_argnum=1, static_kwargkey=plain)


register()
