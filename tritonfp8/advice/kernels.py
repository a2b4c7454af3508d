"""The GPU time of a function by kernel: GEMMs, casts and all others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

GEMM_KERNELS = ("matmul", "hopper_grouped", "gemm", "nvjet", "cutlass", "xmma", "cublas")
OWN_SUFFIX, INDUCTOR_PREFIX = "_kernel", "triton_"


def profiled(function: Callable[[], Any], runs: int) -> list[tuple[str, float, float]]:
    """Name, launches and GPU seconds of each kernel in a call of ``function``, means over ``runs`` calls.

    Call it after all timing: the profiler's library stays loaded and slows every later launch.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(runs):
            function()
        torch.cuda.synchronize()
    return [
        (event.key, event.count / runs, event.self_device_time_total / 1e6 / runs)
        for event in profiler.key_averages()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]


def is_own(kernel: str) -> bool:
    """Whether a kernel of this name is of this package."""
    return kernel.endswith(OWN_SUFFIX) and not kernel.startswith(INDUCTOR_PREFIX)


def kernel_seconds(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sum ``(name, seconds)`` of kernels into GEMMs, casts (all other kernels of this package: the passes that find
    amaxes, too) and others; nothing if all are zero.
    """
    sums = {"gemm_seconds": 0.0, "cast_seconds": 0.0, "other_seconds": 0.0}
    for name, seconds in kernels:
        # Inductor names a kernel after the ops around it.
        is_gemm = not name.startswith(INDUCTOR_PREFIX) and any(part in name.lower() for part in GEMM_KERNELS)
        sums["gemm_seconds" if is_gemm else "cast_seconds" if is_own(name) else "other_seconds"] += seconds
    return sums if any(sums.values()) else {}
