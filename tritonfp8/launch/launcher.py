"""One launcher for all ops: it runs the plan of a call. Without a plan it copies tensors, or runs the reference."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from tritonfp8.launch.executor import planned
from tritonfp8.launch.plan import PlanFunction

Pick = Callable[[Sequence[Any]], tuple[Any, ...]]
Function = TypeVar("Function", bound=Callable[..., Any])


class Plannable(NamedTuple):
    """How the arguments of an op become the arguments of its planner.

    Attributes:
        planner: makes the plans of the op. Its parameters are tensors (annotated as views), then options; each has the
            name that it has in the op.
        parameters: names of the arguments of the op, in order.
        defaults: values of the last of these, which a call may leave out.
        tensors, options: names of the parameters of the planner. One that the op lacks is None in its calls. A tensor
            may be a list of them, which the planner gets one by one.
        is_one: whether the op returns one tensor, which its plan returns as a tuple of one.
    """

    planner: PlanFunction
    parameters: tuple[str, ...]
    defaults: tuple[Any, ...]
    tensors: tuple[str, ...]
    options: tuple[str, ...]
    is_one: bool

    @classmethod
    def of(cls, planner: PlanFunction, like: Callable[..., Any]) -> Plannable:
        """For an op with the parameters, defaults and result of ``like``, its reference."""
        signature = inspect.signature(like)
        defaults = tuple(p.default for p in signature.parameters.values() if p.default is not p.empty)
        _, *given = inspect.signature(planner).parameters.values()
        tensors = tuple(p.name for p in given if str(p.annotation).startswith("View"))
        options = tuple(p.name for p in given if p.name not in tensors)
        is_one = signature.return_annotation in (Tensor, "Tensor")
        return cls(planner, tuple(signature.parameters), defaults, tensors, options, is_one)

    @classmethod
    def of_lists(cls, planner: PlanFunction, like: Callable[..., Any]) -> Plannable:
        """For an op of lists of tensors: the planner gets all tensors, then the other arguments of ``like``."""
        known = cls.of(planner, like)
        parameters = inspect.signature(like).parameters
        tensors = tuple(name for name, p in parameters.items() if "Tensor" in str(p.annotation))
        return known._replace(tensors=tensors, options=tuple(name for name in parameters if name not in tensors))

    def completed(self, args: tuple[Any, ...], named: Mapping[str, Any] = MappingProxyType({})) -> tuple[Any, ...]:
        """The arguments of a call, optional ones perhaps by name, and the defaults of those that it leaves out."""
        missing = len(self.parameters) - len(args)
        values = [*args, *self.defaults[len(self.defaults) - missing :]]
        for name, value in named.items():
            values[self.parameters.index(name)] = value
        return tuple(values)

    def pick(self, names: Sequence[str], has_lists: bool = False) -> Pick:
        """A function that takes the arguments of these names from all arguments of a call; lists one by one."""
        places = [self.parameters.index(name) for name in names]
        if has_lists:
            return lambda args: tuple(flat([args[place] for place in places]))
        if len(places) > 1:
            return operator.itemgetter(*places)
        return lambda args: tuple([args[place] for place in places])


def flat(values: Sequence[Any]) -> list[Any]:
    """``values``, with the elements of a list in its place; a view is a tuple, and no list."""
    return [x for value in values for x in (value if type(value) in (list, tuple) else (value,))]


def lists_served_by(planner: PlanFunction, like: Callable[..., Any]) -> Callable[[Function], Function]:
    """As :func:`served_by`, for an op of lists of tensors; see :meth:`Plannable.of_lists`."""

    def mark(function: Function) -> Function:
        function.plannable = Plannable.of_lists(planner, like)
        return function

    return mark


def served_by(planner: PlanFunction, like: Callable[..., Any]) -> Callable[[Function], Function]:
    """Mark a function that does more than :func:`launcher`, whose calls a plan serves as a rule: ``plannable``."""

    def mark(function: Function) -> Function:
        function.plannable = Plannable.of(planner, like)
        return function

    return mark


def launcher(
    planner: PlanFunction, like: Callable[..., Any], otherwise: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """The twin of an op of :mod:`tritonfp8.reference` by kernels.

    Args:
        planner: makes the plans of its calls; see :class:`Plannable`.
        like: the reference. It serves calls without elements, and dtypes that no kernel reads.
        otherwise: serves calls that have no plan; it returns None for calls that it leaves to the usual way: strided
            tensors are copied, and if there are none the reference runs.

    Returns:
        A function with the parameters of ``like``; ``plannable`` is an attribute of it.
    """
    known = Plannable.of(planner, like)
    # Others, such as a configuration, are for who calls the planner.
    known = known._replace(options=tuple(name for name in known.options if name in known.parameters))
    count, is_one, complete = len(known.parameters), known.is_one, known.completed
    tensors, options = known.pick(known.tensors), known.pick(known.options)

    @functools.wraps(like)
    def run(*args: Any, **named: Any) -> Any:
        if named or len(args) < count:
            args = complete(args, named)
        results = planned(planner, tensors(args), options(args))
        if results is not None:
            return results[0] if is_one else results
        if otherwise is not None and (found := otherwise(*args)) is not None:
            return found
        copies = [x.contiguous() if isinstance(x, Tensor) else x for x in args]
        if all(x is y for x, y in zip(copies, args, strict=True)):
            return like(*args)
        return run(*copies)

    run.plannable = known
    run.__doc__ = f"Launch the twin of :func:`tritonfp8.reference.{like.__name__}`."
    return run
