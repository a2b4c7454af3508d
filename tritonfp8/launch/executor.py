"""Run the plan of a call, and repeat it for later calls with the same key.

Choosing tiles and configurations, working out strides and describing the arguments of some fifty parameters costs more
host time than the launch itself. So the first call with given shapes, strides, dtypes, alignments and options makes a
plan (:mod:`tritonfp8.launch.plan`) and runs it through Triton, which compiles the kernels. The second call makes what
repeats it, which costs as much again: the number of tokens may be a new one in each step. Later calls allocate the
buffers of the plan, fill addresses in, and launch the compiled kernels by the function of C under Triton's launcher.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as HopperDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from tritonfp8.compat import hardware, torch_private, triton_private
from tritonfp8.compat.triton_private import Address, DescribedAddress, RawCall, launches_are_watched
from tritonfp8.launch.kernel_cache import MAX_ENTRIES, run
from tritonfp8.launch.plan import ALIGNMENT, Buffer, Plan, PlanFunction, TensorMap, View, make_plan, workspace
from tritonfp8.tuning import on_change

Results = tuple[Tensor, ...]
_Repeat = Callable[[list[Any]], Results]


class _Known(NamedTuple):
    """What earlier calls with one key found.

    Attributes:
        plan: None if the call has none.
        repeat: what repeats it; None before the second call, or if only Triton can launch the kernels.
        is_final: whether later calls will find no more.
    """

    plan: Plan | None
    repeat: _Repeat | None
    is_final: bool


_plans: dict[tuple[object, ...], _Known] = {}
_warned: set[str] = set()
generation = [0]
"""How often the plans were dropped, in a list that never changes. Who keeps what repeats a plan compares the number."""


def forget() -> None:
    """Drop every plan: the choice of configurations changed."""
    generation[0] += 1
    _plans.clear()


on_change(forget)


def planned(function: PlanFunction, tensors: Sequence[Tensor | None], options: tuple[object, ...]) -> Results | None:
    """Run a call by its plan and return its results; None if the call cannot be planned.

    Args:
        function: makes the plan.
        tensors: of the call, all on one device. The first is not None.
        options: the other arguments, hashable.
    """
    addresses, key = _described(function, tensors, options)
    found = _plans.get(key)
    if found is None or found.repeat is None or launches_are_watched():
        return _planned_slowly(key, found, function, tensors, options)
    return found.repeat(addresses)


def _described(
    function: PlanFunction, tensors: Sequence[Tensor | None], options: tuple[object, ...]
) -> tuple[list[Any], tuple[object, ...]]:
    """The addresses of the tensors, with which the slots of a plan begin; and the key of the plan."""
    first = tensors[0]
    assert first is not None
    addresses: list[Any] = []
    # Host time of an eager call: each step of the loop counts.
    key: list[object] = [function, options, first.get_device()]
    bits = 0
    for x in tensors:
        if x is None:
            addresses.append(None)
            key.append(None)
            continue
        address = x.data_ptr()
        addresses.append(address)
        bits |= address
        key.append(x.shape)
        key.append(x.stride())
        key.append(x.dtype)
    # Usually all are aligned.
    if bits % ALIGNMENT:
        key += [address and address % ALIGNMENT for address in addresses]
    return addresses, tuple(key)


def repeat_of(
    function: PlanFunction, tensors: Sequence[Tensor | None], options: tuple[object, ...]
) -> tuple[Callable[[list[Any]], Results] | None, bool]:
    """What repeats a call like this one, which ran before; None if only :func:`planned` serves it.

    It takes the addresses of the tensors in a list, which it extends, and is right for tensors with the layouts and
    alignments of these, until :data:`generation` changes, and while nobody watches launches.

    Returns:
        The function or None, and whether that is final: the second call of a kind makes the function.
    """
    found = _plans.get(_described(function, tensors, options)[1])
    return (None, True) if found is None else found[1:]


def _planned_slowly(
    key: tuple[object, ...],
    found: _Known | None,
    function: PlanFunction,
    tensors: Sequence[Tensor | None],
    options: tuple[object, ...],
) -> Results | None:
    if found is not None:
        if found.plan is None:
            return None
        slots, compiled = _run(found.plan, tensors)
        if not found.is_final:
            _keep(key, _Known(found.plan, _repeat_or_warn(found.plan, slots, compiled), True))
        return _results(found.plan, slots)
    first = tensors[0]
    assert first is not None
    views = [None if x is None else View.of(x, slot) for slot, x in enumerate(tensors)]
    plan = make_plan(function, views, options, hardware.abilities(first.device))
    if plan is None:
        _keep(key, _Known(None, None, True))
        return None
    slots, _ = _run(plan, tensors)
    if not triton_private.INTERPRETING:
        if missing := triton_private.MISSING:
            _warn_once(", ".join(missing))
        _keep(key, _Known(plan, None, bool(missing)))
    return _results(plan, slots)


def _keep(key: tuple[object, ...], known: _Known) -> None:
    if len(_plans) >= MAX_ENTRIES:
        _plans.clear()
    _plans[key] = known


def _results(plan: Plan, slots: Sequence[Tensor | None]) -> Results:
    return tuple(_tensor(slots, view) for view in plan.outputs)


def _run(plan: Plan, tensors: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[Any]]:
    """Run a plan through Triton: its slots, and the compiled form of each launch."""
    first = tensors[0]
    assert first is not None
    slots = [*tensors, *(_allocate(buffer, first.device) for buffer in plan.buffers)]
    compiled = [
        run(
            launch.kernel,
            launch.programs,
            [_pointer(slots, pointer) for pointer in launch.pointers],
            launch.integers,
            launch.constants,
            **launch.options,
        )
        for launch in plan.launches
    ]
    return slots, compiled


def _allocate(buffer: Buffer, device: torch.device) -> Tensor:
    out = torch.empty_strided(buffer.shape, buffer.strides, dtype=buffer.dtype, device=device)
    return out.zero_() if buffer.zeroed else out


def _tensor(slots: Sequence[Tensor | None], view: View) -> Tensor:
    x = slots[view.slot]
    assert x is not None
    if view[1:5] == (tuple(x.shape), x.stride(), x.dtype, 0):
        return x
    start = x.storage_offset() + view.offset // view.itemsize
    return x.view(view.dtype).as_strided(view.shape, view.strides, start)


def _pointer(slots: Sequence[Tensor | None], pointer: View | TensorMap | None) -> Any:
    if isinstance(pointer, TensorMap):
        return _descriptor(pointer, _tensor(slots, pointer.view))
    return None if pointer is None else _tensor(slots, pointer)


@functools.cache
def _swizzled(swizzle: int, bits: int, rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=rank)


def _descriptor(map: TensorMap, x: Tensor) -> Any:
    shape, strides, block = list(x.shape), list(x.stride()), list(map.block)
    if map.swizzle is None:
        return TensorDescriptor(x, shape, strides, block)
    return HopperDescriptor(x, shape, strides, block, _swizzled(map.swizzle, 8 * x.element_size(), len(block)))


def _warn_once(cause: str) -> None:
    if cause not in _warned:
        _warned.add(cause)
        warnings.warn(
            f"tritonfp8 launches kernels through Triton's own launch, which takes more host time: {cause}", stacklevel=5
        )


def _repeat_or_warn(plan: Plan, slots: Sequence[Tensor | None], compiled: Sequence[Any]) -> _Repeat | None:
    try:
        return _repeat_of(plan, slots, compiled)
    except triton_private.UnavailableError as error:
        _warn_once(str(error))
        return None


def _argument(slots: Sequence[Tensor | None], pointer: View | TensorMap | None) -> Any:
    """A pointer as :func:`tritonfp8.compat.triton_private.raw_launches` takes it."""
    if isinstance(pointer, TensorMap):
        return DescribedAddress(pointer.view.slot, pointer.view.offset, _pointer(slots, pointer))
    return None if pointer is None else Address(pointer.slot, pointer.offset)


def _repeat_of(plan: Plan, slots: Sequence[Tensor | None], compiled: Sequence[Any]) -> _Repeat:
    """A function that does what a plan says, given the addresses of its inputs in a list, which it extends.

    ``slots``: of the first run. Only their layouts are kept.
    """
    assert slots[0] is not None
    device = slots[0].device
    allocate = torch_private.empty_strided(device)
    stream_of, index = triton_private.stream_getter(), device.index or 0
    dependent = hardware.abilities(device).has_dependent_launch
    calls = [
        RawCall(
            kernel,
            launch.programs,
            [_argument(slots, pointer) for pointer in launch.pointers],
            (*launch.integers, *launch.constants.values(), dependent),
        )
        for launch, kernel in zip(plan.launches, compiled, strict=True)
    ]
    offsets, size = workspace(plan)
    # Buffers with a tensor of their own, in the order of the plan; the other ones are parts of one block.
    own = [i for i, buffer in enumerate(plan.buffers) if i not in offsets]
    places = [(None, offsets[i]) if i in offsets else (each[:3], 0) for i, each in enumerate(plan.buffers)]
    zeroed = [index for index, i in enumerate(own) if plan.buffers[i].zeroed]
    launch_all = triton_private.raw_launches(plan.inputs + len(plan.buffers), calls)
    outputs = [(own.index(i), view) for i, view in (_output(plan, view) for view in plan.outputs)]
    # The usual case: these tensors are returned as they are.
    first = len(outputs) if outputs == [(i, None) for i in range(len(outputs))] else None

    def repeat(addresses: list[Any]) -> Results:
        tensors = []
        # Kept until the launches: then later work of this stream may take the memory.
        block = allocate((size,), (1,), torch.uint8) if size else None
        start = 0 if block is None else block.data_ptr()
        for layout, offset in places:
            if layout is None:
                addresses.append(start + offset)
                continue
            tensor = allocate(*layout)
            tensors.append(tensor)
            addresses.append(tensor.data_ptr())
        for i in zeroed:
            tensors[i].zero_()
        # This thread's current stream, read at each call.
        launch_all(stream_of(index), addresses)
        if first is not None:
            return tuple(tensors[:first])
        return tuple(
            [tensors[i] if view is None else tensors[i].view(view[0]).as_strided(*view[1]) for i, view in outputs]
        )

    return repeat


def _output(plan: Plan, view: View) -> tuple[int, Any]:
    """The buffer of an output, by its index, and the arguments of the view of it; None for all of the buffer."""
    index = view.slot - plan.inputs
    assert index >= 0, "a repeated plan returns what it allocated"
    if view[1:5] == (*plan.buffers[index][:3], 0):
        return index, None
    return index, (view.dtype, (view.shape, view.strides, view.offset // view.itemsize))
