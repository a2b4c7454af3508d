"""Layers that read one tensor quantize it once."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from tritonfp8.compat import torch_private
from tritonfp8.layers.changes import versions
from tritonfp8.layers.linear.operands import OperandProvider, Pair, Specs
from tritonfp8.layers.tensor_types import TENSORS

_T = TypeVar("_T")


class _Entry:
    """The casts of one tensor, and the layers that took them."""

    __slots__ = ("input", "readers", "siblings", "state", "values")

    def __init__(self, input: Tensor, state: object, siblings: object) -> None:
        values: dict[object, Any] = {}
        # The casts die with the input: nobody else can be called with it.
        self.input = weakref.ref(input, lambda _: values.clear())
        self.state = state
        self.siblings = siblings
        self.readers: set[SharedInput] = set()
        self.values = values


class _ThreadCasts(threading.local):
    entry: _Entry | None = None
    # Where casts are made again to compare them: the layers that took a cast of other values.
    stale: set[SharedInput] | None = None


_thread = _ThreadCasts()


@contextmanager
def compared_casts() -> Iterator[set[SharedInput]]:
    """Inside the block this thread makes each shared cast once more, and compares; the host waits for the device.

    The value has the layers that took a cast of values that their input no longer had.
    """
    before, _thread.stale = _thread.stale, set()
    try:
        yield _thread.stale
    finally:
        _thread.stale = before


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8 if x.itemsize == 1 else torch.int32)


def _are_equal(pairs: tuple[Pair, Pair], others: tuple[Pair, Pair]) -> bool:
    """Whether casts have the same bits."""
    return all(
        x is None or y is None or torch.equal(_bits(x), _bits(y))
        for pair, other in zip(pairs, others, strict=True)
        for x, y in zip(pair, other, strict=True)
    )


def forget() -> None:
    """Drop the entry of this thread: a layer without siblings came in between."""
    if _thread.entry is not None:
        _thread.entry = None


def _state(x: Tensor) -> tuple[Any, ...] | None:
    """The state in which a cast of ``x`` is made: it serves a layer in an equal state. None: it serves nobody."""
    counted = x._version if type(x) in TENSORS and not x.is_inference() else versions(x)
    if counted is None:
        return None
    # Selective checkpointing counts the ops in its mode, so a cast made outside of it must be made again inside.
    depth = torch_private.dispatch_mode_count()
    modes = tuple([weakref.ref(torch_private.dispatch_mode_at(i)) for i in range(depth)]) if depth else ()
    # Another stream does not wait for the cast, and a captured graph must contain it.
    where = (torch_private.raw_stream(x.get_device()), torch.cuda.is_current_stream_capturing()) if x.is_cuda else None
    # Inference tensors cannot be saved for backward.
    return counted, modes, where, torch.is_inference_mode_enabled()


class SharedInput:
    """Lets sibling layers, which read one tensor, quantize it once; each layer has its own.

    A thread keeps one entry: the casts of the last tensor that a sibling was called with. They serve a sibling that is
    called with the same object, at the same version, on the same thread and stream and in the same dispatch modes. Each
    layer takes them once: its next call with that tensor starts over. The entry is dropped when all siblings took
    theirs, when the tensor dies, and when another converted layer or another tensor comes.

    Writes that torch does not count (``.data``, a kernel of the caller's) between the calls of two siblings go
    unnoticed, but for :func:`tritonfp8.verify`. A tensor without a version counter (of inference mode) is never shared.
    A compiled graph shares nothing by this: torch merges equal casts there, if the graph has a backward.
    """

    def __init__(self, siblings: list[SharedInput] | None = None) -> None:
        self._siblings = [] if siblings is None else siblings
        self._siblings.append(self)

    @staticmethod
    def group(count: int) -> list[SharedInput]:
        """One for each of ``count`` siblings."""
        siblings: list[SharedInput] = []
        return [SharedInput(siblings) for _ in range(count)]

    def _entry(self, input: Tensor) -> _Entry | None:
        """The entry that this layer may use, made if needed; None if ``input`` cannot be shared."""
        state = _state(input)
        if state is None:
            _thread.entry = None
            return None
        found = _thread.entry
        if (
            found is None
            or found.input() is not input
            or found.siblings is not self._siblings
            or self in found.readers
            or found.state != state
        ):
            found = _thread.entry = _Entry(input, state, self._siblings)
        return found

    def once(self, input: Tensor, key: object, make: Callable[[], _T]) -> _T:
        """The result of ``make``, called once for all siblings that are called with this ``input``.

        A layer must call this before :meth:`quantize`, after which it has taken its share.
        """
        if torch.compiler.is_compiling():
            return make()
        entry = self._entry(input)
        if entry is None:
            return make()
        if key not in entry.values:
            entry.values[key] = make()
        value: _T = entry.values[key]
        return value

    def quantize(self, input: Tensor, rows: Tensor, specs: Specs, provider: OperandProvider) -> tuple[Pair, Pair]:
        """``rows`` quantized by ``specs``, the arguments of the provider's ``input``.

        Shared under ``input``, the tensor that the siblings are called with.
        """
        if torch.compiler.is_compiling():
            return provider.input(rows, specs)
        entry = self._entry(input)
        if entry is None:
            return provider.input(rows, specs)
        key = (specs, rows.dtype, rows.shape, provider.input_key)
        pairs: tuple[Pair, Pair] | None = entry.values.get(key)
        if pairs is None:
            pairs = entry.values[key] = provider.input(rows, specs)
        elif _thread.stale is not None and not _are_equal(pairs, provider.input(rows, specs)):
            _thread.stale.add(self)
        entry.readers.add(self)
        if len(entry.readers) == len(self._siblings):
            _thread.entry = None
        return pairs
