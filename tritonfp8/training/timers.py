"""Times on a device: CUDA events on a GPU, which do not wait for it; the host's clock on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


def now(device: torch.device) -> Any:
    """The present moment on ``device``, for :func:`seconds_between`: on a GPU, an event on its current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def wall_seconds(function: Callable[[], object]) -> float:
    """Host seconds of a call."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def seconds_between(begin: Any, end: Any) -> float:
    """Seconds between two results of :func:`now`. A GPU must have reached both: synchronize before."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


def gpu_seconds(functions: Sequence[Callable[[], object]], before: Callable[[], object]) -> list[float]:
    """Seconds that the current GPU takes for each function, called once each, in order.

    ``before`` runs before each of them and is not timed: it flushes L2, for example. The host does not wait for the GPU
    in between. If the GPU has caught up with the host when a function starts, the host's time is measured with it.
    """
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in functions]
    for function, (begin, end) in zip(functions, events, strict=True):
        before()
        begin.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return [seconds_between(begin, end) for begin, end in events]
