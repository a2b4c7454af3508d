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
import typing
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tritonfp8.launch import kernel_cache
from tritonfp8.launch.kernel_cache import ALIGNMENT, MAX_ENTRIES, Launched, recorded_launches
from tritonfp8.tuning import on_change

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
    _aten.unsqueeze.default,
    _aten.view.default,
    _aten.view.dtype,
}


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


class _TensorMaps:
    """The tensor maps that a launch gets for one argument, by the address of what they describe."""

    def __init__(self, descriptor: Any, meta: Any, describe: Callable[[Any, Any], Sequence[Any]]) -> None:
        self._descriptor, self._meta, self._describe = copy.copy(descriptor), meta, describe
        self._descriptor.base = _Address(descriptor.base.data_ptr())
        self.known: dict[int, Any] = {}
        # Sizes and strides, which follow the map among the arguments.
        self.rest = tuple(describe(self._descriptor, meta))[1:]

    def make(self, address: int) -> Any:
        """The map of ``address``, which was not known."""
        if len(self.known) >= MAX_TENSOR_MAPS:
            self.known.clear()
        twin = copy.copy(self._descriptor)
        twin.base = _Address(address)
        found = self.known[address] = self._describe(twin, self._meta)[0]
        return found


class _Code:
    """Lines of a function, and what the names in them stand for."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: dict[str, object] = {}

    def text(self, value: object) -> str:
        """``value`` as an expression."""
        if value is None or type(value) in (int, bool):
            return repr(value)
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def texts(self, values: Iterable[object]) -> list[str]:
        """Each of ``values`` as an expression."""
        return [self.text(value) for value in values]

    def function(self, parameters: Sequence[str]) -> Callable[..., Any]:
        """The function of these parameters."""
        text = "\n    ".join([f"def planned({', '.join(parameters)}):", *self.lines])
        exec(text, self.names)
        return cast(Callable[..., Any], self.names["planned"])


# Index of a tensor among those of the call and buffers, and how far in an address lies.
_Place = tuple[int, int]


def _launch_line(code: _Code, launched: Launched, place_of: Callable[[int], _Place]) -> str:
    """The launch of a compiled kernel, with addresses where its arguments are tensors."""
    launcher = launched.compiled.run
    names = ("launch", "global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    if any(not hasattr(launcher, name) for name in names):
        raise _Unknown(f"Triton's launcher lacks one of {', '.join(names)}")
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        raise _Unknown("the kernel needs scratch memory")
    if getattr(launcher, "gsan_enabled", False):
        raise _Unknown("Triton's sanitizer adds arguments to the launch")
    raw, describe, metadata = _raw_launch(launcher.launch)
    maps = iter(metadata)
    arguments: list[str] = []
    for pointer in launched.pointers:
        if pointer is None or (isinstance(pointer, Tensor) and not pointer.data_ptr()):
            arguments.append("None")
        elif isinstance(pointer, Tensor):
            index, offset = place_of(pointer.data_ptr())
            arguments.append(f"p{index} + {offset}" if offset else f"p{index}")
        else:
            meta = next(maps, None)
            if meta is None:
                raise _Unknown("a descriptor that is no tensor map")
            index, offset = place_of(pointer.base.data_ptr())
            if offset:
                raise _Unknown("a descriptor of a part of a buffer")
            tensor_maps = _TensorMaps(pointer, meta, describe)
            known, make = code.texts((tensor_maps.known.get, tensor_maps.make))
            arguments += [f"{known}(p{index}) or {make}(p{index})", *code.texts(tensor_maps.rest)]
    arguments += code.texts((*launched.integers, *launched.constants))
    kernel_cache = launched.compiled
    flags = code.texts((kernel_cache.function, launcher.launch_cooperative_grid, launcher.launch_pdl))
    packed = code.text(kernel_cache.packed_metadata)
    if hasattr(launcher, "arg_annotations"):
        more = code.texts((launcher.arg_annotations, launcher.kernel_signature))
        tail = [packed, *["None"] * 5, *more, f"({''.join(f'{a}, ' for a in arguments)})"]
    else:
        tail = ["None", "None", packed, *["None"] * 3, *arguments]
    return f"{code.text(raw)}({', '.join([str(launched.programs), '1, 1', 'stream', *flags, *tail])})"


def _raw_launch(launch: Any) -> tuple[Any, Any, Sequence[Any]]:
    """The C function under Triton's launcher; what describes descriptors to it; and what was known of each of them."""
    if not inspect.isfunction(launch):
        return launch, None, ()
    known = inspect.getclosurevars(launch)
    names = {**known.globals, **known.nonlocals}
    try:
        launcher, describe, metadata = (names[n] for n in ("launcher", "make_tensordesc_arg", "tensordesc_meta"))
    except KeyError as error:
        raise _Unknown(f"Triton's launcher has no {error}") from error
    if len(inspect.signature(describe).parameters) == 3:
        # Since Triton 3.8 it is also given the launch, of which CUDA's looks at nothing.
        return launcher, lambda descriptor, meta: describe(descriptor, meta, None), metadata or ()
    return launcher, describe, metadata or ()


def _allocator(device: torch.device) -> Callable[[Any, Any, torch.dtype], Tensor]:
    """``torch.empty_strided`` on a device that is the current one.

    By the function that Inductor's code allocates with, where torch has it: it takes half of the time.
    """
    quick = getattr(getattr(torch._C._dynamo, "guards", None), f"_empty_strided_{device.type}", None)
    return quick or (lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device))


def _places(tensors: Sequence[Tensor | None], buffers: Sequence[Tensor]) -> Callable[[int], _Place]:
    """What tells where an address lies."""
    starts = {tensor.data_ptr(): i for i, tensor in enumerate((*tensors, *buffers)) if tensor is not None}

    def place_of(address: int) -> _Place:
        if address in starts:
            return starts[address], 0
        # Buffers are aligned wherever they come to lie, and so their parts always are alike.
        for tensor in buffers:
            offset = address - tensor.data_ptr()
            if 0 < offset < tensor.untyped_storage().nbytes():
                return starts[tensor.data_ptr()], offset
        raise _Unknown("a pointer into the middle of an input")

    return place_of


def _output(code: _Code, tensor: Tensor, place: _Place, first: int, buffers: Sequence[Tensor]) -> str:
    """The expression of a result; ``first`` is the index of the first buffer."""
    index, offset = place[0] - first, place[1]
    if index < 0:
        raise _Unknown("an input is returned")
    if offset:
        raise _Unknown("a part of a buffer is returned")
    buffer = buffers[index]
    layout = tuple(tensor.shape), tensor.stride()
    if (*layout, tensor.dtype) == (tuple(buffer.shape), buffer.stride(), buffer.dtype):
        return f"b{index}"
    return f"b{index}.view({code.text(tensor.dtype)}).as_strided({layout[0]}, {layout[1]})"


def _planned(
    tensors: Sequence[Tensor | None], watch: _Watch, launches: Sequence[Launched], result: Any, device: torch.device
) -> Callable[..., Any]:
    """A function that does what a call did, given the addresses of other tensors of the same kind.

    Its source is written for this call: what a loop over its buffers, launches and arguments would look up is constant.

    Args:
        tensors: those of the call, None where there may be one. The function takes the address of each, or None.
        watch: what it allocated.
        launches: what it launched.
        result: what it returned.
        device: on which that was.
    """
    buffers = [tensor for tensor, _ in watch.buffers]
    place_of = _places(tensors, buffers)
    code = _Code()
    allocate = code.text(_allocator(device))
    for i, (buffer, zeroed) in enumerate(watch.buffers):
        layout = f"{tuple(buffer.shape)}, {buffer.stride()}, {code.text(buffer.dtype)}"
        code.lines.append(f"b{i} = {allocate}({layout})")
        code.lines += [f"b{i}.zero_()"] if zeroed else []
        code.lines.append(f"p{len(tensors) + i} = b{i}.data_ptr()")
    stream_of = code.text(triton.runtime.driver.active.get_current_stream)
    code.lines.append(f"stream = {stream_of}({device.index or 0})")
    code.lines += [_launch_line(code, launched, place_of) for launched in launches]
    several = isinstance(result, (tuple, list))
    outputs = [
        _output(code, tensor, place_of(tensor.data_ptr()), len(tensors), buffers)
        for tensor in (result if several else (result,))
    ]
    opening, closing = ("[", "]") if isinstance(result, list) else ("(", ",)") if several else ("", "")
    code.lines.append(f"return {opening}{', '.join(outputs)}{closing}")
    return code.function([f"p{i}" for i in range(len(tensors))])


_plans: dict[tuple[object, ...], Callable[..., Any] | None] = {}
_warned: set[str] = set()


def forget() -> None:
    """Drop every plan: the choice of configurations changed."""
    _plans.clear()


on_change(forget)


def _is_unusual() -> bool:
    """Whether kernels are interpreted, or somebody (a profiler) wants to see each launch."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    watched = (enter is not None and getattr(enter, "calls", True)) or (leave and getattr(leave, "calls", True))
    return kernel_cache.INTERPRETING or bool(watched)


def _call_again(
    key: tuple[object, ...], function: Callable[..., Any], args: Sequence[Any], tensors: Sequence[Tensor | None]
) -> Any:
    """The call, with a plan of it noted if this is the first."""
    inputs = [x for x in tensors if x is not None]
    # One address for two arguments: which of them a kernel got cannot be told.
    if key in _plans or len({x.data_ptr() for x in inputs}) < len(inputs):
        return function(*args)
    with recorded_launches() as launches, _Watch() as watch:
        result = function(*args)
    plan = None
    if watch.only_launched and launches:
        try:
            plan = _planned(tensors, watch, launches, result, inputs[0].device)
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
            return _call_again(key, function, ({names},), ({tensors},))
        return plan({addresses})
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
    assert tensors
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
    addresses = [*found, *(f"None if {name} is None else {name}.data_ptr()" for name in maybe)]
    return _CALL.format(
        signature=", ".join([*signature, *(["*"] if options else []), *(f"{name}=None" for name in options)]),
        unusual="".join(f"{name} is not None or " for name in options),
        passed=", ".join([*names, *(f"{name}={name}" for name in options)]),
        assigned="; ".join(f"{address} = {name}.data_ptr()" for address, name in zip(found, tensors, strict=True)),
        key=", ".join(key),
        names=", ".join(names),
        tensors=", ".join([*tensors, *maybe]),
        addresses=", ".join(addresses),
    )


def replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a launch function; calls with keyword-only options are never repeated.

    Args:
        function: its parameters are annotated: ``Tensor``, one at least, ``Tensor | None``, ``Sequence[int]`` and what
            can be hashed. Keyword-only ones are None by default.
    """
    namespace: dict[str, Any] = {}
    exec(_source(function), globals(), namespace)
    return functools.wraps(function)(namespace["decorate"](function))
