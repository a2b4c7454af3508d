"""Chains: several ops as one call, so that the host looks one plan up for all of them.

A chain says which ops run one after another, and on which tensors: on tensors that the call gets, or on results of
earlier ops. It is a text wherever an op or a graph has it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritonfp8.reference import casts, codes, gemms

FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        function.__name__: function
        for function in (
            casts.quantize,
            casts.quantize_both,
            casts.quantize_both_sum,
            casts.quantize_weights,
            casts.quantize_with_amax,
            codes.transpose_codes,
            gemms.scaled_matmul,
        )
    }
)
"""The ops that may be steps of a chain, by their names."""
_TENSOR, _DTYPE = "tensor", "dtype"


class TensorPlace(int):
    """The index of a tensor among the tensors that a chain gets, followed by the results of its steps."""


class ChainStep(NamedTuple):
    """One op of a chain.

    Attributes:
        op: its name.
        args: all by position; a :class:`TensorPlace` for each tensor.
    """

    op: str
    args: tuple[Any, ...]


class Chain(NamedTuple):
    """Ops that run one after another.

    Attributes:
        steps: in this order.
        outputs: places of the tensors that the chain returns.
    """

    steps: tuple[ChainStep, ...]
    outputs: tuple[int, ...]

    @property
    def text(self) -> str:
        """The chain as JSON, for :meth:`of`."""
        return json.dumps([[[op, _written(args)] for op, args in self.steps], self.outputs])

    @staticmethod
    @functools.cache
    def of(text: str) -> Chain:
        """The chain of a text."""
        steps, outputs = json.loads(text)
        return Chain(tuple(ChainStep(op, tuple(map(_read, args))) for op, args in steps), tuple(outputs))

    def run(self, tensors: Sequence[Any], function_of: Callable[[str], Callable[..., Any]]) -> list[Any]:
        """The outputs, by the functions that ``function_of`` returns for the names of ops."""
        values = [*tensors]
        for op, args in self.steps:
            found = function_of(op)(*[_filled(each, values) for each in args])
            values += found if isinstance(found, list | tuple) else [found]
        return [values[place] for place in self.outputs]


def _written(value: Any) -> Any:
    if isinstance(value, TensorPlace):
        return {_TENSOR: int(value)}
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    return [*map(_written, value)] if isinstance(value, list | tuple) else value


def _read(value: Any) -> Any:
    if isinstance(value, dict):
        return TensorPlace(value[_TENSOR]) if _TENSOR in value else getattr(torch, value[_DTYPE])
    return [*map(_read, value)] if isinstance(value, list) else value


def _filled(value: Any, values: Sequence[Any]) -> Any:
    if isinstance(value, TensorPlace):
        return values[value]
    return [_filled(each, values) for each in value] if isinstance(value, list) else value


class _Recorder:
    """The steps so far, and how many tensors there are."""

    def __init__(self, count: int) -> None:
        self.steps: list[ChainStep] = []
        self.count = count

    def new(self) -> Recorded:
        """What stands for one more tensor."""
        self.count += 1
        return Recorded(self, TensorPlace(self.count - 1))


class Recorded:
    """Stands for a matrix while a function that calls ops on it is recorded."""

    ndim = 2

    def __init__(self, recorder: _Recorder, place: TensorPlace) -> None:
        self.recorder, self.place = recorder, place

    def detach(self) -> Recorded:
        """The same: a chain has no gradients."""
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a call of an op."""
        assert hasattr(function, "_schema"), f"{function} is no op of a chain"
        assert not kwargs, f"{function} gets arguments by name"
        recorder = next(x.recorder for x in args if isinstance(x, cls))
        places = tuple(x.place if isinstance(x, cls) else x for x in args)
        recorder.steps.append(ChainStep(function._opname, places))
        results = [recorder.new() for _ in function._schema.returns]
        return results[0] if len(results) == 1 else tuple(results)


def recorded(function: Callable[..., Sequence[Any]], given: Sequence[bool]) -> tuple[str, tuple[bool, ...]]:
    """The chain of a function of matrices that only calls ops, by position.

    Args:
        function: returns matrices that ops made; or None for some.
        given: for each of its arguments whether it is a matrix, or None.

    Returns:
        The text of the chain, which gets the matrices; and for each result whether it is a matrix.
    """
    recorder = _Recorder(sum(given))
    places = map(TensorPlace, range(sum(given)))
    results = function(*[Recorded(recorder, next(places)) if each else None for each in given])
    outputs = tuple(int(x.place) for x in results if x is not None)
    return Chain(tuple(recorder.steps), outputs).text, tuple(x is not None for x in results)


def chain(x: Tensor, others: Sequence[Tensor], chain: str) -> list[Tensor]:
    """What a chain makes of tensors: of ``x`` and ``others``, in the order of its places.

    ``chain``: the text of a :class:`Chain`.
    """
    return Chain.of(chain).run((x, *others), FUNCTIONS.__getitem__)
