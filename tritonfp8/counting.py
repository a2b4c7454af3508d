"""Counts of the GEMMs that really ran, by kind: FP8 tensor cores, emulated, reference or high precision.

The ops record each GEMM when they execute it: eager or inside a compiled graph, in forward and in backward (on
autograd's threads). So a count shows what ran, not what a recipe asks for. A CUDA graph replays kernels without the
ops; its GEMMs are not counted.
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
    """FLOPs (2 M N K a GEMM) and calls of the GEMMs of converted layers, by kind: a key of :data:`KINDS`."""

    flops: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    def share(self, *kinds: str) -> float:
        """Share of these kinds in all counted FLOPs; 0.0 if nothing was counted."""
        total = sum(self.flops.values())
        return sum(self.flops[kind] for kind in kinds) / total if total else 0.0


_active: list[GemmCounts] = []


@contextmanager
def count_gemms() -> Iterator[GemmCounts]:
    """Count the GEMMs that run inside the ``with`` block, on every thread of this process."""
    counts = GemmCounts()
    _active.append(counts)
    try:
        yield counts
    finally:
        # By identity: nested blocks may have equal counts, and each must remove only its own.
        _active[:] = [other for other in _active if other is not counts]


def is_active() -> bool:
    """Whether a :func:`count_gemms` block is open."""
    return bool(_active)


def record(kind: str, m: int, n: int, k: int) -> None:
    """Count one GEMM of ``[m, k]`` by ``[n, k].T`` that ran as ``kind``."""
    for counts in _active:
        counts.flops[kind] += 2 * m * n * k
        counts.calls[kind] += 1
