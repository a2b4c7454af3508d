"""Calls of one op at one place of a compiled graph, where tensors always have the same layouts.

To look a plan up, the sizes, strides, dtype and device of each tensor are read and hashed. For a GEMM that takes about
as long as its launch. A call site does so once and keeps what repeats the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tritonfp8.compat import counting, torch_private
from tritonfp8.compat.triton_private import launches_are_watched
from tritonfp8.launch import ALIGNMENT, Plannable, flat, generation, repeat_of


class _Repeat(NamedTuple):
    """A plan that was looked up.

    Attributes:
        run: repeats it.
        pick: gives the tensors among the arguments of a call.
        absent: a None for each optional tensor that the call lacks. They follow its tensors.
        generation: how often plans had been dropped before this one was made.
        device: index of the current device of each call.
    """

    run: Callable[[list[Any]], Any]
    pick: Callable[[Sequence[Any]], Sequence[Tensor]]
    absent: list[None]
    generation: int
    device: int


def _look_up(plannable: Plannable, args: Sequence[Any]) -> tuple[_Repeat | None, bool]:
    """What repeats the plan of a call that ran, None if nothing does; and whether a later call will find no more."""
    values = dict(zip(plannable.parameters, plannable.completed(tuple(args)), strict=True))
    found = [values.get(name) for name in plannable.tensors]
    names = [name for name, x in zip(plannable.tensors, found, strict=True) if x is not None]
    tensors = flat(found)
    given = [x for x in tensors if x is not None]
    # Addresses are joined from two lists, which serves calls whose last tensors are absent.
    if any(x is None for x in tensors[: len(given)]) or any(x.data_ptr() % ALIGNMENT for x in given):
        return None, True
    run, is_final = repeat_of(plannable.planner, tensors, tuple(values.get(name) for name in plannable.options))
    if run is None:
        return None, is_final
    absent = [None] * (len(tensors) - len(given))
    pick = plannable.pick(names, any(isinstance(x, list) for x in found))
    return _Repeat(run, pick, absent, generation[0], given[0].get_device()), True


def call_site(plannable: Plannable, general: Callable[..., Any]) -> Callable[..., Any]:
    """A function for one place in a graph: each of its calls must get tensors of the same layouts and devices.

    Args:
        plannable: the op.
        general: the same for any tensors. It also serves tensors at odd addresses, and calls that somebody counts,
            profiles or intercepts.
    """
    known: _Repeat | None = None
    is_learned, is_one, listeners = False, plannable.is_one, counting.listeners
    modes, is_profiled, current_device = (
        torch_private.dispatch_mode_count,
        torch_private.is_profiled,
        torch_private.current_device_getter(),
    )

    def serve(*args: Any) -> Any:
        """Any call, which may be the first."""
        nonlocal known, is_learned
        result = general(*args)
        if not is_learned or (known is not None and known.generation != generation[0]):
            known, is_learned = _look_up(plannable, args)
        return result

    def call(*args: Any) -> Any:
        if known is None or modes() or is_profiled() or listeners or launches_are_watched():
            return serve(*args)
        run, pick, absent, dropped, device = known
        if dropped != generation[0] or device != current_device():
            return serve(*args)
        addresses: list[Any] = [x.data_ptr() for x in pick(args)]
        for address in addresses:
            if address % ALIGNMENT:
                return serve(*args)
        addresses += absent
        return run(addresses)[0] if is_one else run(addresses)

    return call
