"""All private names of Triton that the package uses: what each is for, and the versions in which it means that.

Triton promises nothing about them. :data:`MISSING` says at import what the installed Triton lacks. If it is not empty,
launches go through ``kernel[grid]``, which is public and takes more host time (:mod:`tritonfp8.launch.executor`).
"""

from __future__ import annotations

import copy
import importlib
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import triton

KNOWN_VERSIONS = ("3.6", "3.7", "3.8", "3.9")
"""Minor versions of Triton whose raw launch was compared with ``kernel[grid]``, parameter by parameter."""

NAMES: Mapping[str, str] = {
    "triton:knobs.runtime.launch_enter_hook": "a profiler sees each launch by it",
    "triton:knobs.runtime.launch_exit_hook": "a profiler sees each launch by it",
    "triton:runtime.driver": "its active.get_current_stream gives the stream of a launch",
    "triton.compiler:CompiledKernel.__getitem__": "launches what was compiled before",
    "triton.backends.nvidia.driver:CudaLauncher": "its instances hold the function of C that launches",
    "triton.backends.nvidia.driver:make_tensordesc_arg": "encodes a TMA descriptor",
}
"""The names that are looked up at import, as ``module:path``, with their use."""

LAUNCHER_NAMES = ("launch", "global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
"""Attributes of a ``CudaLauncher``, which exists once a kernel is compiled."""
CLOSURE_NAMES = ("launcher", "make_tensordesc_arg", "tensordesc_meta")
"""Variables of the function around the raw launch of a kernel with TMA descriptors."""

MAX_TENSOR_MAPS = 1024

_runtime: Any = getattr(getattr(triton, "knobs", None), "runtime", None)
INTERPRETING = bool(getattr(_runtime, "interpret", False))
"""Whether kernels are interpreted: decided when they are decorated, so fixed in a process."""


def _lacks(place: str) -> bool:
    module, _, path = place.partition(":")
    try:
        owner: Any = importlib.import_module(f".{module.partition('.')[2]}", "triton")
        for name in path.split("."):
            owner = getattr(owner, name)
    except (ImportError, AttributeError):
        return True
    return False


def find_missing(version: str, names: Mapping[str, str] = NAMES) -> tuple[str, ...]:
    """The reasons why raw launches do not work with this version of Triton; empty if they work."""
    if ".".join(version.split(".")[:2]) not in KNOWN_VERSIONS:
        return (f"Triton {version} is none of {', '.join(KNOWN_VERSIONS)}",)
    return tuple(f"{place.replace(':', '.')} ({use})" for place, use in names.items() if _lacks(place))


MISSING = find_missing(triton.__version__)
"""Names that the installed Triton lacks for raw launches."""


# By identity: the hash of a function is made of its key.
_settled: set[int] = set()


def settle_key(kernel: Any) -> None:
    """Make Triton's key of a kernel, by which its cache on disk finds it, the same in every process.

    The key of a function covers the constants that its callees read, but only of callees that have a key when their
    caller gets its own. So it would depend on what a process launched before: a kernel that a warm-up compiled would be
    compiled again. Here callees get their keys first. Kernels without a key, such as the interpreter's kernels, do not
    change.
    """
    if id(kernel) in _settled:
        return
    _settled.add(id(kernel))
    function = getattr(kernel, "fn", None)
    if not inspect.isfunction(function):
        return
    names = set(function.__code__.co_names)
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        inside = [getattr(value, each, None) for each in names] if inspect.ismodule(value) else [value]
        for callee in inside:
            if isinstance(callee, triton.JITFunction):
                settle_key(callee)
    getattr(kernel, "cache_key", None)


class UnavailableError(Exception):
    """This kernel cannot be launched past Triton. The message says what is missing."""


class Address(NamedTuple):
    """A pointer argument: ``offset`` bytes after the address of a slot."""

    slot: int
    offset: int


class DescribedAddress(NamedTuple):
    """A TMA descriptor argument, by a descriptor object of the same layout at any address."""

    slot: int
    offset: int
    descriptor: Any


class RawCall(NamedTuple):
    """One launch past Triton.

    Attributes:
        compiled: the kernel, loaded on its device.
        programs: number of programs.
        pointers: :class:`Address`, :class:`DescribedAddress` or None, the first arguments of the kernel.
        others: all other arguments, compile-time ones included.
    """

    compiled: Any
    programs: int
    pointers: Sequence[Address | DescribedAddress | None]
    others: Sequence[Any]


RawLaunches = Callable[[int, list[Any]], None]
"""Launches on a stream, given the address of each slot in a list, which it extends."""


def launches_are_watched() -> bool:
    """Whether somebody (a profiler) wants to see each launch, which a raw launch hides."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return (enter is not None and getattr(enter, "calls", True)) or (
        leave is not None and getattr(leave, "calls", True)
    )


def stream_getter() -> Callable[[int], int]:
    """A function from the index of a device to its current stream."""
    return triton.runtime.driver.active.get_current_stream


def launch_compiled(compiled: Any, programs: int, arguments: Sequence[Any]) -> None:
    """Launch a compiled kernel with all arguments by position, compile-time ones included."""
    compiled[programs, 1, 1](*arguments)


class _Base:
    """Stands for the tensor of a descriptor: only its address matters."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class _TensorMaps:
    """The encoded tensor maps of one descriptor argument, by address."""

    def __init__(self, descriptor: Any, meta: Any, encode: Callable[[Any, Any], Sequence[Any]]) -> None:
        self._descriptor, self._meta, self._encode = copy.copy(descriptor), meta, encode
        # The tensor is not kept alive. Its address is real: the driver may refuse to encode another.
        self._descriptor.base = _Base(descriptor.base.data_ptr())
        self.known: dict[int, Any] = {}
        # Sizes and strides, which follow the map among the arguments.
        self.rest = tuple(encode(self._descriptor, meta))[1:]

    def make(self, address: int) -> Any:
        """The map of an address that is not known yet."""
        if len(self.known) >= MAX_TENSOR_MAPS:
            self.known.clear()
        twin = copy.copy(self._descriptor)
        twin.base = _Base(address)
        found = self.known[address] = self._encode(twin, self._meta)[0]
        return found


def _unwrapped(launch: Any) -> tuple[Any, Any, Sequence[Any]]:
    """The function of C under the launcher, the encoder of descriptors, and the metadata of each descriptor."""
    if not inspect.isfunction(launch):
        return launch, None, ()
    variables = inspect.getclosurevars(launch)
    known = {**variables.globals, **variables.nonlocals}
    if lacking := [name for name in CLOSURE_NAMES if name not in known]:
        raise UnavailableError(f"the launch function of Triton {triton.__version__} has no {', '.join(lacking)}")
    launcher, encode, metadata = (known[name] for name in CLOSURE_NAMES)
    if len(inspect.signature(encode).parameters) == 3:
        # Since Triton 3.8 the encoder also gets the launcher, which CUDA's does not read.
        return launcher, lambda descriptor, meta: encode(descriptor, meta, None), metadata or ()
    return launcher, encode, metadata or ()


class _Pool:
    """Values from which the first arguments of launches are picked.

    The addresses of the slots, constants, addresses with an offset, and tensor maps, in this order.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.constants: list[Any] = []
        self.shifted: list[tuple[int, int]] = []
        self.mapped: list[tuple[int, int, Callable[[int], Any], Callable[[int], Any]]] = []

    def address(self, argument: Address) -> tuple[str, int]:
        """Kind and index of a plain pointer."""
        if not argument.offset:
            return "slot", argument.slot
        return "shifted", _index(self.shifted, (argument.slot, argument.offset))

    def constant(self, value: Any) -> tuple[str, int]:
        """Kind and index of a value that never changes."""
        return "constant", _index(self.constants, value)

    def map(self, argument: DescribedAddress, maps: _TensorMaps) -> tuple[str, int]:
        """Kind and index of a tensor map."""
        self.mapped.append((argument.slot, argument.offset, maps.known.get, maps.make))
        return "mapped", len(self.mapped) - 1

    def position(self, kind: str, index: int) -> int:
        """Where a value lies, once all are known."""
        before = {"slot": 0, "constant": self._slots}
        before["shifted"] = before["constant"] + len(self.constants)
        before["mapped"] = before["shifted"] + len(self.shifted)
        return before[kind] + index


def _index(values: list[Any], value: Any) -> int:
    if value not in values:
        values.append(value)
    return values.index(value)


def _require_launchable(launcher: Any) -> None:
    if lacking := [name for name in LAUNCHER_NAMES if not hasattr(launcher, name)]:
        raise UnavailableError(f"the launcher of Triton {triton.__version__} has no {', '.join(lacking)}")
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        raise UnavailableError("a kernel needs scratch memory")
    if getattr(launcher, "gsan_enabled", False):
        raise UnavailableError("Triton's sanitizer adds arguments to the launch")


def _in_pool(pool: _Pool, pointers: Sequence[Any], encode: Any, metadata: Sequence[Any]) -> list[tuple[str, int]]:
    """Kind and index of each argument that the pointers of a launch become."""
    descriptor_metadata = iter(metadata)
    found: list[tuple[str, int]] = []
    for pointer in pointers:
        if pointer is None:
            found.append(pool.constant(None))
        elif isinstance(pointer, Address):
            found.append(pool.address(pointer))
        else:
            meta = next(descriptor_metadata, None)
            if meta is None:
                raise UnavailableError("a descriptor is not passed as a tensor map")
            maps = _TensorMaps(pointer.descriptor, meta, encode)
            found += [pool.map(pointer, maps), *map(pool.constant, maps.rest)]
    return found


def raw_launches(slots: int, calls: Sequence[RawCall]) -> RawLaunches:
    """A function that launches compiled kernels one after another, without Triton's own handling of arguments.

    One call of C picks the pointers of a launch from a list: a loop in Python would cost a microsecond.

    Args:
        slots: how many addresses it gets.
        calls: what to launch.

    Raises:
        UnavailableError: a launcher lacks a name, or a kernel needs what only Triton's launch gives.
    """
    pool, picked, raws = _Pool(slots), [], []
    for call in calls:
        _require_launchable(call.compiled.run)
        raw, encode, metadata = _unwrapped(call.compiled.run.launch)
        picked.append(_in_pool(pool, call.pointers, encode, metadata))
        raws.append(raw)
    # Of two places or more it picks a tuple.
    picks = [operator.itemgetter(*(pool.position(*place) for place in places)) for places in picked]
    typed = bool(calls) and hasattr(calls[0].compiled.run, "arg_annotations")
    steps = [
        (raw, _head(call, typed), pick, tuple(call.others))
        for raw, call, pick in zip(raws, calls, picks, strict=True)
    ]  # fmt: skip
    constants, shifted, mapped = pool.constants, pool.shifted, pool.mapped

    def launch_all(stream: int, values: list[Any]) -> None:
        values += constants
        for slot, offset in shifted:
            values.append(values[slot] + offset)
        for slot, offset, known, make in mapped:
            address = values[slot] + offset
            values.append(known(address) or make(address))
        for raw, (programs, head), pick, others in steps:
            if typed:
                raw(programs, 1, 1, stream, *head, pick(values) + others)
            else:
                raw(programs, 1, 1, stream, *head, *pick(values), *others)

    return launch_all


def _head(call: RawCall, typed: bool) -> tuple[int, tuple[Any, ...]]:
    """Number of programs; and the arguments of a raw launch between its stream and the arguments of the kernel."""
    launcher, packed = call.compiled.run, call.compiled.packed_metadata
    flags = call.compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl
    # Beside the metadata: hooks and scratch memory.
    if typed:
        # Since Triton 3.7 one function of C launches every kernel. It gets the arguments as a tuple, after their types.
        return call.programs, (*flags, packed, *[None] * 5, launcher.arg_annotations, launcher.kernel_signature)
    return call.programs, (*flags, None, None, packed, None, None, None)
