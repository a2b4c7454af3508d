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
import operator
import typing
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
MAX_STREAMS = 128

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

    def __init__(self, launched: Launched, slots: int, slot_of: Callable[[int], tuple[int, int]]) -> None:
        launcher = launched.compiled.run
        names = ("launch", "global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
        if any(not hasattr(launcher, name) for name in names):
            raise _Unknown(f"Triton's launcher lacks one of {', '.join(names)}")
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            raise _Unknown("the kernel needs scratch memory")
        self.raw, self._describe, metadata = _raw_launch(launcher.launch)
        parts: list[tuple[int, int]] = []
        self.maps: list[tuple[int, Any, Any, dict[int, Any]]] = []
        # What each argument is: a slot, a part of one, a tensor map, or (None) what it was.
        sources: list[tuple[str, int] | None] = []
        arguments: list[Any] = []
        for pointer in launched.pointers:
            if pointer is None or (isinstance(pointer, Tensor) and not pointer.data_ptr()):
                arguments.append(None)
            elif isinstance(pointer, Tensor):
                slot, offset = slot_of(pointer.data_ptr())
                sources += [None] * (len(arguments) - len(sources))
                sources.append(("part", len(parts)) if offset else ("slot", slot))
                parts += [(slot, offset)] if offset else []
                arguments.append(None)
            else:
                descriptor, meta = copy.copy(pointer), metadata[len(self.maps)]
                if meta is None:
                    raise _Unknown("a descriptor that is no tensor map")
                slot, offset = slot_of(pointer.base.data_ptr())
                if offset:
                    raise _Unknown("a descriptor of a part of a buffer")
                descriptor.base = _Address(pointer.base.data_ptr())
                sources += [None] * (len(arguments) - len(sources))
                sources.append(("map", len(self.maps)))
                self.maps.append((slot, descriptor, meta, {}))
                arguments.extend(self._describe(descriptor, meta))
        arguments += [*launched.integers, *launched.constants]
        self._arrange(slots, parts, sources, arguments)
        self._heads: dict[int, tuple[Any, ...]] = {}
        compiled = launched.compiled
        self._grid = (launched.programs, 1, 1)
        flags = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl)
        self.flat = not hasattr(launcher, "arg_annotations")
        tail: tuple[Any, ...] = (None, None, compiled.packed_metadata, None, None, None)
        if not self.flat:
            tail = (
                compiled.packed_metadata, None, None, None, None, None, launcher.arg_annotations,
                launcher.kernel_signature,
            )  # fmt: skip
        self._tail = (*flags, *tail)

    def _arrange(
        self,
        slots: int,
        parts: list[tuple[int, int]],
        sources: list[tuple[str, int] | None],
        arguments: list[Any],
    ) -> None:
        """How to make the arguments of a launch in few steps: pick from addresses, parts, maps and what stays.

        ``pick`` takes the arguments up to the last that changes, ``rest`` are those after it.
        """
        # itemgetter of one index returns no tuple.
        sources += [None] * (2 - len(sources))
        self.parts = parts
        self.fixed = arguments[: len(sources)] if None in sources else []
        begins = {"slot": 0, "part": slots, "map": slots + len(parts)}
        fixed = slots + len(parts) + len(self.maps)
        self.pick = operator.itemgetter(
            *(fixed + i if source is None else begins[source[0]] + source[1] for i, source in enumerate(sources))
        )
        self.rest = tuple(arguments[len(sources) :])
        self.only_slots = not (self.parts or self.maps or self.fixed)

    def _head(self, stream: int) -> tuple[Any, ...]:
        if len(self._heads) >= MAX_STREAMS:
            self._heads.clear()
        head = self._heads[stream] = (*self._grid, stream, *self._tail)
        return head

    def _map(self, address: int, descriptor: Any, meta: Any, known: dict[int, Any]) -> Any:
        if len(known) >= MAX_TENSOR_MAPS:
            known.clear()
        twin = copy.copy(descriptor)
        twin.base = _Address(address)
        found = known[address] = self._describe(twin, meta)[0]
        return found

    def _values(self, addresses: list[int]) -> list[Any]:
        values: list[Any] = addresses.copy()
        for slot, offset in self.parts:
            values.append(addresses[slot] + offset)
        for slot, descriptor, meta, known in self.maps:
            address = addresses[slot]
            values.append(known.get(address) or self._map(address, descriptor, meta, known))
        values += self.fixed
        return values

    def __call__(self, stream: int, addresses: list[int]) -> None:
        values = addresses if self.only_slots else self._values(addresses)
        head = self._heads.get(stream) or self._head(stream)
        if self.flat:
            self.raw(*head, *self.pick(values), *self.rest)
        else:
            self.raw(*head, (*self.pick(values), *self.rest))


def _raw_launch(launch: Any) -> tuple[Any, Any, Sequence[Any]]:
    """The C function under Triton's launcher; what describes descriptors to it; and what was known of each of them."""
    if not inspect.isfunction(launch):
        return launch, None, ()
    known = inspect.getclosurevars(launch)
    try:
        return known.nonlocals["launcher"], known.globals["make_tensordesc_arg"], known.nonlocals["tensordesc_meta"]
    except KeyError as error:
        raise _Unknown(f"Triton's launcher has no {error}") from error


def _allocator(device: torch.device) -> Callable[[Any, Any, torch.dtype], Tensor]:
    """``torch.empty_strided`` on a device that is the current one.

    By the function that Inductor's code allocates with, where torch has it: it takes half of the time.
    """
    quick = getattr(getattr(torch._C._dynamo, "guards", None), f"_empty_strided_{device.type}", None)
    return quick or (lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device))


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

        self.index = device.index or 0
        self.allocate = _allocator(device)
        self.buffers = [_Buffer(tuple(t.shape), t.stride(), t.dtype, zeroed) for t, zeroed in watch.buffers]
        self.launches = [_Launch(launched, len(inputs) + len(allocated), slot_of) for launched in launches]
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
        allocate, buffers = self.allocate, []
        for size, stride, dtype, zeroed in self.buffers:
            buffer = allocate(size, stride, dtype)
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


def _is_unusual() -> bool:
    """Whether kernels are interpreted, or somebody (a profiler) wants to see each launch."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    watched = (enter is not None and getattr(enter, "calls", True)) or (leave and getattr(leave, "calls", True))
    return compiled.INTERPRETING or bool(watched)


def _call_again(key: tuple[object, ...], function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The call, with a plan of it noted if this is the first."""
    inputs = [arg for arg in args if isinstance(arg, Tensor)]
    # One address for two arguments: which of them a kernel got cannot be told.
    if key in _plans or len({x.data_ptr() for x in inputs}) < len(inputs):
        return function(*args)
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


# Spelled out for the parameters of a function: a loop over them takes a microsecond more of a product's call.
_CALL = """
def decorate(function):
    def call({signature}):
        if {unusual}_is_unusual():
            return function({passed})
        {assigned}
        key = ({key},)
        plan = _plans.get(key)
        if plan is None:
            return _call_again(key, function, ({names},))
        {collected}
        return plan.run(addresses)
    return call
"""
_LAYOUT = "{0}.shape, {0}.stride(), {0}.dtype, {0}.get_device()"


def _source(function: Callable[..., Any]) -> str:
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    plain = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    options = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    names = [p.name for p in plain]
    tensors = [name for name in names if hints[name] is Tensor]
    maybe = [name for name in names if hints[name] == Tensor | None]
    sequences = [name for name in names if hints[name] == Sequence[int]]
    others = [name for name in names if name not in (*tensors, *maybe, *sequences)]
    # The order in which a plan knows them.
    assert tensors == [name for name in names if name in (*tensors, *maybe)][: len(tensors)] != []
    found = [f"{name}_address" for name in tensors]
    misaligned = [f"{address} % {ALIGNMENT}" for address in found]
    key = [
        repr(function.__name__),
        *others,
        *(f"tuple({name})" for name in sequences),
        *map(_LAYOUT.format, tensors),
        # Aligned ones, the usual case, in one step.
        f"({' | '.join(found)}) % {ALIGNMENT} and ({', '.join(misaligned)},)",
        *(f"{name} is not None and ({_LAYOUT.format(name)}, {name}.data_ptr() % {ALIGNMENT})" for name in maybe),
    ]
    signature = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in plain]
    collected = [f"addresses = [{', '.join(found)}]"]
    collected += [f"if {name} is not None: addresses.append({name}.data_ptr())" for name in maybe]
    return _CALL.format(
        signature=", ".join([*signature, *(["*"] if options else []), *(f"{name}=None" for name in options)]),
        unusual="".join(f"{name} is not None or " for name in options),
        passed=", ".join([*names, *(f"{name}={name}" for name in options)]),
        assigned="; ".join(f"{address} = {name}.data_ptr()" for address, name in zip(found, tensors, strict=True)),
        key=", ".join(key),
        names=", ".join(names),
        collected=f"\n{8 * ' '}".join(collected),
    )


def replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a launch function; calls with keyword-only options are never repeated.

    Args:
        function: its parameters are annotated: ``Tensor``, one at least; after those ``Tensor | None``; anywhere
            ``Sequence[int]`` and what can be hashed. Keyword-only ones are None by default.
    """
    namespace: dict[str, Any] = {}
    exec(_source(function), globals(), namespace)
    return functools.wraps(function)(namespace["decorate"](function))
