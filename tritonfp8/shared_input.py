"""Layers that read one tensor quantize it once."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tritonfp8.operands import Pair, Quantizer
from tritonfp8.specs import QuantSpec

_T = TypeVar("_T")


class _Entry(NamedTuple):
    input: weakref.ref[Tensor]
    version: int | None
    values: dict[object, Any]


class SharedInput:
    """Lets sibling layers that read one tensor quantize it once, while the module around them runs.

    An entry is for the very tensor object that came before, and for its version; between :meth:`open` and
    :meth:`close`, which are called when the parent's forward begins and ends, on the same thread. A write that torch
    does not see (a kernel of the caller's, ``.data``) between two siblings' calls is not noticed. This does nothing in
    a compiled graph, where torch makes equal casts one if the graph has a backward.
    """

    def __init__(self) -> None:
        self._depth: dict[int, int] = {}
        self._entries: dict[int, _Entry] = {}

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # A copy of a model starts with nothing shared.
        return SharedInput, ()

    def open(self, *args: object) -> None:
        """The parent's forward begins."""
        if not torch.compiler.is_compiling():
            thread = threading.get_ident()
            self._depth[thread] = self._depth.get(thread, 0) + 1
            self._entries.pop(thread, None)

    def close(self, *args: object) -> None:
        """The parent's forward ended, by a result or an error."""
        if not torch.compiler.is_compiling():
            thread = threading.get_ident()
            self._entries.pop(thread, None)
            depth = self._depth.pop(thread, 0)
            if depth > 1:
                self._depth[thread] = depth - 1

    def once(self, input: Tensor, key: object, make: Callable[[], _T]) -> _T:
        """What ``make`` returns, the same for all layers that are called with this ``input``."""
        if torch.compiler.is_compiling():
            return make()
        thread = threading.get_ident()
        if thread not in self._depth:
            return make()
        version = None if input.is_inference() else input._version
        found = self._entries.get(thread)
        if found is None or found.input() is not input or found.version != version:
            found = self._entries[thread] = _Entry(weakref.ref(input), version, {})
        if key not in found.values:
            found.values[key] = make()
        return found.values[key]

    def quantize(
        self, input: Tensor, rows: Tensor, specs: tuple[QuantSpec | None, QuantSpec | None], quantizer: Quantizer
    ) -> tuple[Pair, Pair]:
        """``rows`` quantized by both specs; ``input`` is the tensor that the layer was called with."""
        key = (specs, rows.dtype, rows.shape, quantizer)
        return self.once(input, key, lambda: quantizer.quantize("input", rows, *specs))
