"""Counts of the matrix products that really ran, by what they ran on.

The ops record each product when they execute it, eager or inside a compiled graph, in forward and in backward (which
runs on threads of its own), so a count is what happened and not what a recipe promises. A CUDA graph replays kernels
without the ops and is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

KINDS = {
    "fp8": "FP8 tensor cores",
    "emulated": "a Triton kernel that multiplies in bf16, to which the operands convert exactly",
    "reference": "the reference on the CPU, in float32",
    "high_precision": "a GEMM that the recipe keeps in the input's dtype",
}


@dataclass
class GemmCounts:
    """FLOPs (2 M N K a product) and calls of the products of converted layers, by kind: a key of :data:`KINDS`."""

    flops: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    def share(self, *kinds: str) -> float:
        """Share of all counted FLOPs that is of these kinds; 0.0 where nothing was counted."""
        total = sum(self.flops.values())
        return sum(self.flops[kind] for kind in kinds) / total if total else 0.0


_active: list[GemmCounts] = []


@contextmanager
def count_gemms() -> Iterator[GemmCounts]:
    """Count the products that run inside the ``with`` block, on every thread of this process."""
    counts = GemmCounts()
    _active.append(counts)
    try:
        yield counts
    finally:
        # By identity: two counts that are equal must not end each other.
        _active[:] = [other for other in _active if other is not counts]


def is_active() -> bool:
    """Whether anybody counts."""
    return bool(_active)


def record(kind: str, m: int, n: int, k: int) -> None:
    """Note one product of ``[m, k]`` by ``[n, k].T`` that ran as ``kind``."""
    for counts in _active:
        counts.flops[kind] += 2 * m * n * k
        counts.calls[kind] += 1
