"""Decoding by a CUDA graph that is captured once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

Call = Callable[..., Any]
# Calls before the capture, which compile for the shapes and for the lengths that change between calls.
_CALLS_BEFORE = 2


class Replayed:
    """Replays the compiled forward of a model that decodes one token, as a CUDA graph.

    A graph of ``torch.compile`` unwraps each weight of codes, and checks each parameter, at every call: on the host
    that takes longer than the GPU needs to decode.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.release()

    def release(self) -> None:
        """Forget the graph, and with it the cache that it reads."""
        self._cache: Any = None
        self._key: object = None
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._output: Any = None

    @contextmanager
    def replaying(self, cache: Any) -> Iterator[None]:
        """Let ``generate`` of transformers decode by replays where it would call the compiled forward.

        Args:
            cache: a static one whose layers keep their length in a tensor: a graph changes no number of Python.
        """
        tensors = [*self._model.parameters(), *self._model.buffers()]
        addresses = tuple(address for x in tensors for address in _addresses(x))
        before = self._model.get_compiled_call

        def compiled_call(config: Any) -> Call:
            compiled = before(config)

            def call(past_key_values: Any = None, **inputs: Any) -> Any:
                assert past_key_values is cache
                return self._call(compiled, cache, addresses, inputs)

            return call

        self._model.get_compiled_call = compiled_call
        try:
            yield
        finally:
            del self._model.get_compiled_call

    def _call(self, compiled: Call, cache: Any, addresses: object, inputs: dict[str, Any]) -> Any:
        leaves, tree = _pytree.tree_flatten(inputs)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        others = [(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in leaves]
        key = compiled, addresses, others, tree
        if key != self._key or cache is not self._cache:
            self.release()
            self._key, self._cache = key, cache
        self._calls += 1
        if self._calls <= _CALLS_BEFORE:
            return compiled(past_key_values=cache, **inputs)
        if self._graph is None:
            self._inputs = [x.clone() for x in tensors]
            kept = iter(self._inputs)
            inputs = _pytree.tree_unflatten([next(kept) if isinstance(x, Tensor) else x for x in leaves], tree)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(tensors[0].device), torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._output = compiled(past_key_values=cache, **inputs)
        for kept_input, x in zip(self._inputs, tensors, strict=True):
            kept_input.copy_(x)
        self._graph.replay()
        return self._output


def _addresses(x: Any) -> tuple[int, ...]:
    return tuple(part.data_ptr() for part in x._both()) if hasattr(x, "_both") else (x.data_ptr(),)


def can_replay(cache: Any) -> bool:
    """Whether a replay decodes with this cache as a call does."""
    return not any(hasattr(layer, "cumulative_length_int") for layer in cache.layers)
