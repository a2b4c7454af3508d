"""Repeat what a launch function did before for tensors of the same shapes, without asking again what to do.

Choosing tiles and configurations, working out strides and describing the arguments of some fifty parameters costs more
host time than the launch itself. The first call with given shapes, strides, dtypes and options is watched: what it
allocated, and which compiled kernels it launched on which of these and of its inputs. Later calls allocate, fill the
addresses in and launch. A call that ran anything else (a copy, a reference op) is not repeated but done again.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tritonfp8 import compiled
from tritonfp8.compiled import ALIGNMENT, MAX_ENTRIES, Launched, recorded_launches

MAX_TENSOR_MAPS = 1024

_aten = torch.ops.aten
_ALLOCATORS = {
    _aten.empty.memory_format: False,
    _aten.empty_strided.default: False,
    _aten.new_empty.default: False,
    _aten.new_empty_strided.default: False,
    _aten.zeros.default: True,
    _aten.new_zeros.default: True,
}
_VIEWS = {
    _aten.alias.default,
    _aten.as_strided.default,
    _aten.detach.default,
    _aten.slice.Tensor,
    _aten.split_with_sizes.default,
    _aten.t.default,
    _aten.transpose.int,
    _aten.view.default,
    _aten.view.dtype,
}


class _Buffer(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    zeroed: bool


class _Watch(TorchDispatchMode):
    """Notes what is allocated, and whether anything ran that is neither an allocation nor a view."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.buffers: list[tuple[Tensor, bool]] = []
        self.only_launched = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ALLOCATORS:
            # A tensor that only shows strides has no memory.
            if not out.is_meta:
                self.buffers.append((out, _ALLOCATORS[func]))
        elif func not in _VIEWS:
            self.only_launched = False
        return out


class _Address:
    """Stands for a tensor of which only the address matters."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class _Unknown(Exception):
    """What was launched cannot be repeated from here."""


class _Launch:
    """One launch of a compiled kernel, with the places in its arguments where addresses go."""

    def __init__(self, launched: Launched, slot_of: Callable[[int], tuple[int, int]]) -> None:
        launcher = launched.compiled.run
        names = ("launch", "global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
        if any(not hasattr(launcher, name) for name in names):
            raise _Unknown(f"Triton's launcher lacks one of {', '.join(names)}")
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            raise _Unknown("the kernel needs scratch memory")
        self.raw, self._describe, metadata = _raw_launch(launcher.launch)
        self.addresses: list[tuple[int, int, int]] = []
        self.maps: list[tuple[int, int, Any, Any, dict[int, Any]]] = []
        arguments: list[Any] = []
        for pointer in launched.pointers:
            if pointer is None or (isinstance(pointer, Tensor) and not pointer.data_ptr()):
                arguments.append(None)
            elif isinstance(pointer, Tensor):
                self.addresses.append((len(arguments), *slot_of(pointer.data_ptr())))
                arguments.append(None)
            else:
                descriptor, meta = copy.copy(pointer), metadata[len(self.maps)]
                if meta is None:
                    raise _Unknown("a descriptor that is no tensor map")
                slot, offset = slot_of(pointer.base.data_ptr())
                if offset:
                    raise _Unknown("a descriptor of a part of a buffer")
                descriptor.base = _Address(pointer.base.data_ptr())
                self.maps.append((len(arguments), slot, descriptor, meta, {}))
                arguments.extend(self._describe(descriptor, meta))
        self.arguments = [*arguments, *launched.integers, *launched.constants]
        compiled = launched.compiled
        head = (launched.programs, 1, 1)
        flags = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl)
        self.head, self.flags = head, flags
        if hasattr(launcher, "arg_annotations"):
            self.tail: tuple[Any, ...] = (
                compiled.packed_metadata, None, None, None, None, None, launcher.arg_annotations,
                launcher.kernel_signature,
            )  # fmt: skip
            self.flat = False
        else:
            self.tail = (None, None, compiled.packed_metadata, None, None, None)
            self.flat = True

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        arguments = self.arguments.copy()
        for place, slot, offset in self.addresses:
            arguments[place] = addresses[slot] + offset
        for place, slot, descriptor, meta, known in self.maps:
            address = addresses[slot]
            found = known.get(address)
            if found is None:
                if len(known) >= MAX_TENSOR_MAPS:
                    known.clear()
                twin = copy.copy(descriptor)
                twin.base = _Address(address)
                found = known[address] = self._describe(twin, meta)[0]
            arguments[place] = found
        if self.flat:
            self.raw(*self.head, stream, *self.flags, *self.tail, *arguments)
        else:
            self.raw(*self.head, stream, *self.flags, *self.tail, arguments)


def _raw_launch(launch: Any) -> tuple[Any, Any, Sequence[Any]]:
    """The C function under Triton's launcher; what describes descriptors to it; and what was known of each of them."""
    if not inspect.isfunction(launch):
        return launch, None, ()
    known = inspect.getclosurevars(launch)
    try:
        return known.nonlocals["launcher"], known.globals["make_tensordesc_arg"], known.nonlocals["tensordesc_meta"]
    except KeyError as error:
        raise _Unknown(f"Triton's launcher has no {error}") from error


class _Output(NamedTuple):
    buffer: int
    view: tuple[torch.dtype, tuple[int, ...], tuple[int, ...]] | None


class _Plan:
    """What a call did, ready to be done again for other tensors of the same kind."""

    def __init__(
        self, inputs: Sequence[Tensor], watch: _Watch, launches: Sequence[Launched], result: Any, device: torch.device
    ) -> None:
        allocated = [tensor for tensor, _ in watch.buffers]
        slots = {tensor.data_ptr(): i for i, tensor in enumerate((*inputs, *allocated))}

        def slot_of(address: int) -> tuple[int, int]:
            """The tensor that an address lies in, and how far in."""
            if address in slots:
                return slots[address], 0
            # Buffers are aligned wherever they come to lie, and so their parts always are alike.
            for tensor in allocated:
                offset = address - tensor.data_ptr()
                if 0 < offset < tensor.untyped_storage().nbytes():
                    return slots[tensor.data_ptr()], offset
            raise _Unknown("a pointer into the middle of an input")

        self.device = device
        self.index = device.index or 0
        self.buffers = [_Buffer(tuple(t.shape), t.stride(), t.dtype, zeroed) for t, zeroed in watch.buffers]
        self.launches = [_Launch(launched, slot_of) for launched in launches]
        self.collect = type(result) if isinstance(result, (tuple, list)) else None
        self.outputs = [
            self._output(t, *slot_of(t.data_ptr()), len(inputs)) for t in (result if self.collect else (result,))
        ]
        # The first buffers in their order, as they are: the usual case.
        in_order = [(i, None) for i in range(len(self.outputs))]
        self.plain_outputs = len(self.outputs) if [tuple(output) for output in self.outputs] == in_order else None
        self.stream_of = triton.runtime.driver.active.get_current_stream

    def _output(self, tensor: Tensor, slot: int, offset: int, inputs: int) -> _Output:
        buffer = slot - inputs
        if buffer < 0:
            raise _Unknown("an input is returned")
        if offset:
            raise _Unknown("a part of a buffer is returned")
        spec = self.buffers[buffer]
        if (tuple(tensor.shape), tensor.stride(), tensor.dtype) == (spec.size, spec.stride, spec.dtype):
            return _Output(buffer, None)
        return _Output(buffer, (tensor.dtype, tuple(tensor.shape), tensor.stride()))

    def run(self, addresses: list[int]) -> Any:
        """Do it again for inputs at these addresses; the list is used up."""
        empty, device, buffers = torch.empty_strided, self.device, []
        for size, stride, dtype, zeroed in self.buffers:
            buffer = empty(size, stride, dtype=dtype, device=device)
            if zeroed:
                buffer.zero_()
            buffers.append(buffer)
            addresses.append(buffer.data_ptr())
        stream = self.stream_of(self.index)
        for launch in self.launches:
            launch(stream, addresses)
        if self.plain_outputs is not None:
            return self.collect(buffers[: self.plain_outputs]) if self.collect else buffers[0]
        results = [
            buffers[i] if view is None else buffers[i].view(view[0]).as_strided(view[1], view[2])
            for i, view in self.outputs
        ]
        return self.collect(results) if self.collect else results[0]


_plans: dict[tuple[object, ...], _Plan | None] = {}
_UNSEEN: Any = object()
_warned: set[str] = set()


def forget() -> None:
    """Drop every plan: the choice of configurations changed."""
    _plans.clear()


def _hooks_are_set() -> bool:
    """Whether somebody (a profiler) wants to see each launch."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool((enter is not None and getattr(enter, "calls", True)) or (leave and getattr(leave, "calls", True)))


def _record(key: tuple[object, ...], function: Callable[..., Any], args: Sequence[Any]) -> Any:
    inputs = [arg for arg in args if isinstance(arg, Tensor)]
    with recorded_launches() as launches, _Watch() as watch:
        result = function(*args)
    plan = None
    if watch.only_launched and launches:
        try:
            plan = _Plan(inputs, watch, launches, result, inputs[0].device)
        except _Unknown as error:
            if str(error) not in _warned:
                _warned.add(str(error))
                warnings.warn(f"launches take more host time than they need: {error}", stacklevel=4)
    if len(_plans) >= MAX_ENTRIES:
        _plans.clear()
    _plans[key] = plan
    return result


def replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a launch function of tensors and plain values; calls with keyword arguments are never repeated."""
    name = function.__name__

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs or compiled.INTERPRETING:
            return function(*args, **kwargs)
        key: list[object] = [name]
        addresses: list[int] = []
        for arg in args:
            if isinstance(arg, Tensor):
                address = arg.data_ptr()
                addresses.append(address)
                key += (arg.shape, arg.stride(), arg.dtype, arg.device, address % ALIGNMENT)
            elif isinstance(arg, list):
                key += arg
            else:
                key.append(arg)
        # One address for two arguments: which of them a kernel got cannot be told.
        if (len(addresses) > 1 and len(set(addresses)) < len(addresses)) or _hooks_are_set():
            return function(*args)
        frozen = tuple(key)
        # One lookup: hashing what a call was made with takes as long as an allocation.
        plan = _plans.get(frozen, _UNSEEN)
        if plan is _UNSEEN:
            return _record(frozen, function, args)
        return function(*args) if plan is None else plan.run(addresses)

    return call
