"""Times and peak memory on a device. CUDA events of a GPU do not wait for it; times of a CPU are the host's."""

from __future__ import annotations

import statistics
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


def synchronize(device: torch.device) -> None:
    """Wait for all that was launched on ``device``."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_seconds(function: Callable[[], object]) -> float:
    """Host seconds of a call."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def idle_host_seconds(function: Callable[[], object], device: torch.device, calls: int) -> float:
    """Median host seconds of a call that finds ``device`` idle: until it has launched its work."""
    found = []
    for _ in range(calls):
        synchronize(device)
        found.append(wall_seconds(function))
    synchronize(device)
    return statistics.median(found)


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


def settled_seconds(
    function: Callable[[], object],
    runs: int,
    settling: float,
    before: Callable[[], object] = lambda: None,
    most: int | None = None,
) -> list[float]:
    """As :func:`gpu_seconds`, for the last ``runs`` calls of many in a row.

    GEMMs reach the GPU's power limit, and clocks follow the load of the last tenths of a second.

    Args:
        function: the function.
        runs: how many calls count.
        settling: seconds of the calls before them, in which clocks settle.
        before: as for :func:`gpu_seconds`.
        most: the most calls before them, or None.
    """
    once = gpu_seconds([function] * 2, before)[-1]
    count = int(settling / max(once, 1e-6))
    count = count if most is None else min(most, count)
    return gpu_seconds([function] * (count + runs), before)[-runs:]


def allocated(device: torch.device) -> int:
    """Bytes allocated now; 0 on a CPU. Resets the peak."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_bytes(device: torch.device, since: int) -> int | None:
    """Peak of allocated bytes beyond ``since``, a result of :func:`allocated`; None on a CPU."""
    return torch.cuda.max_memory_allocated(device) - since if device.type == "cuda" else None
