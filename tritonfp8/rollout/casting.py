"""Casts of many weights into codes that exist: on a GPU, one launch of the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tritonfp8.rollout.sharing import OwnWeight

Key = tuple[tuple[object, ...], ...]


class CastsInPlace:
    """Casts weights into their codes, at the same addresses each time.

    The host needs longer to launch the casts than a GPU to run them. So what is cast a second time between the same
    addresses is captured as a CUDA graph, which the host launches at once. A weight that autocast reads in another
    dtype stays out of it, because its copy in this dtype would keep its memory.
    """

    def __init__(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        self._key: Key = ()

    def __deepcopy__(self, memo: object) -> CastsInPlace:
        return CastsInPlace()

    def __call__(self, weights: Sequence[OwnWeight], dtype: torch.dtype | None) -> None:
        """Write the codes of all ``weights``; ``dtype`` is the dtype of autocast, or None."""
        together = [each for each in weights if dtype in (None, each.parameter.dtype)]
        key: Key = tuple(map(_addresses, together)) if _can_be_captured(together) else ()
        if key != self._key or not key:
            # Kernels are compiled and loaded the first time, which a capture forbids.
            self._graph, self._key, together = None, key, []
        else:
            if self._graph is None:
                self._graph = _captured(together, dtype)
            self._graph.replay()
        for each in weights:
            if each not in together:
                each.cast(dtype)


def _addresses(each: OwnWeight) -> tuple[object, ...]:
    codes = each.tensor._both()  # type: ignore[attr-defined]
    weight = each.parameter
    return *(x.data_ptr() for x in (weight, *codes)), weight.dtype, weight.stride()


def _can_be_captured(weights: Sequence[OwnWeight]) -> bool:
    devices = {each.parameter.device for each in weights}
    return len(devices) == 1 and devices.pop().type == "cuda" and not torch.cuda.is_current_stream_capturing()


def _captured(weights: Sequence[OwnWeight], dtype: torch.dtype | None) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as a loader of data, may use the GPU meanwhile.
    with torch.cuda.device(weights[0].parameter.device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for each in weights:
            each.cast(dtype)
    return graph
