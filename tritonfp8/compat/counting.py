"""Counts of the GEMMs that really ran, by kind: FP8 tensor cores, bf16 of codes, reference or high precision.

The ops record each GEMM when they execute it: eager or inside a compiled graph, in forward and in backward (on
autograd's threads). So a count shows what ran, not what a recipe asks for. A CUDA graph replays kernels without the
ops; its GEMMs are not counted.

:func:`log_gemms` also records which layer a GEMM belongs to. The layer travels with its call: a module announces itself
(:func:`calling`), the plan of the call takes it (:func:`take_callers`) and carries it into backward, and each GEMM is
announced before it runs (:func:`announce`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

KINDS = {
    "fp8": "FP8 tensor cores",
    "dequantized": "torch's GEMM in bf16, after a kernel that converts the operands, which is exact",
    "emulated": "a Triton kernel that multiplies in bf16, to which the operands convert exactly",
    "reference": "the reference on the CPU, in float32",
    "high_precision": "a GEMM that the recipe keeps in the input's dtype",
}


class RanGemm(NamedTuple):
    """One GEMM of ``[m, k]`` by ``[n, k].T`` that ran.

    Attributes:
        kind: a key of :data:`KINDS`.
        m, n, k: its sizes.
        operands: for each operand the text of its spec, or its dtype in high precision.
        device: on which it ran; None if that was not recorded.
        layer: the module that it belongs to; None if no module announced itself.
        gemm: ``"output"``, ``"grad_input"`` or ``"grad_weight"``; None if no module announced itself.
    """

    kind: str
    m: int
    n: int
    k: int
    operands: tuple[str, str] = ("", "")
    device: Any = None
    layer: Any = None
    gemm: str | None = None

    @property
    def flops(self) -> int:
        """2 M N K."""
        return 2 * self.m * self.n * self.k


class _Listener(Protocol):
    def add(self, ran: RanGemm) -> None:
        """Called with each GEMM that ran."""


@dataclass
class GemmCounts:
    """FLOPs (2 M N K a GEMM) and calls of the GEMMs of converted layers, by kind: a key of :data:`KINDS`."""

    flops: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    def add(self, ran: RanGemm) -> None:
        """Count one GEMM."""
        self.flops[ran.kind] += ran.flops
        self.calls[ran.kind] += 1

    def share(self, *kinds: str) -> float:
        """Share of these kinds in all counted FLOPs; 0.0 if nothing was counted."""
        total = sum(self.flops.values())
        return sum(self.flops[kind] for kind in kinds) / total if total else 0.0


class GemmLog:
    """The GEMMs and the calls of layers inside a :func:`log_gemms` block.

    Attributes:
        gemms: each GEMM, in the order in which they ended.
        calls: how often each layer was called, recomputes included.
    """

    def __init__(self) -> None:
        self.gemms: list[RanGemm] = []
        self.calls: Counter[Any] = Counter()

    def add(self, ran: RanGemm) -> None:
        """Note one GEMM."""
        self.gemms.append(ran)


class _ThreadLogs(threading.local):
    # The layers that were called and whose plan is not made yet, and the GEMM that runs next.
    callers: tuple[Any, ...] = ()
    announced: tuple[Any, str] | None = None


_thread = _ThreadLogs()
listeners: list[_Listener] = []
"""The open counts and logs. The list object never changes, so callers may keep it."""
_logs: list[GemmLog] = []
is_logging = False
"""Whether a :func:`log_gemms` block is open. Layers read it in each eager call, so it is a plain name."""


@contextmanager
def _listening(listener: _Listener) -> Iterator[None]:
    listeners.append(listener)
    try:
        yield
    finally:
        # By identity: nested blocks may have equal counts, and each must remove only its own.
        listeners[:] = [other for other in listeners if other is not listener]


@contextmanager
def count_gemms() -> Iterator[GemmCounts]:
    """Count the GEMMs that run inside the ``with`` block, on every thread of this process."""
    counts = GemmCounts()
    with _listening(counts):
        yield counts


@contextmanager
def log_gemms() -> Iterator[GemmLog]:
    """Log the GEMMs of eager layers that run inside the ``with`` block, each with its layer, on every thread."""
    global is_logging
    log = GemmLog()
    _logs.append(log)
    is_logging = True
    try:
        with _listening(log):
            yield log
    finally:
        _logs[:] = [other for other in _logs if other is not log]
        is_logging = bool(_logs)
        _thread.callers, _thread.announced = (), None


def is_active() -> bool:
    """Whether a :func:`count_gemms` or :func:`log_gemms` block is open."""
    return bool(listeners)


def calling(*layers: Any) -> None:
    """These layers are called: the next plans that this thread makes are theirs."""
    _thread.callers = layers
    for log in _logs:
        log.calls.update(layers)


def resume(*layers: Any) -> None:
    """As :func:`calling`, for a call that was counted already."""
    _thread.callers = layers


def take_callers(count: int = 1) -> tuple[Any, ...]:
    """The ``count`` layers that were announced by :func:`calling` and not taken yet; Nones if there are not as many."""
    callers, _thread.callers = _thread.callers, ()
    return callers if len(callers) == count else (None,) * count


def announce(layer: Any, gemm: str) -> None:
    """The next GEMM on this thread is this one of this layer."""
    _thread.announced = layer, gemm


def record(kind: str, m: int, n: int, k: int, operands: tuple[str, str] = ("", ""), device: Any = None) -> None:
    """Count one GEMM of ``[m, k]`` by ``[n, k].T`` that ran as ``kind``; see :class:`RanGemm`."""
    layer, gemm = _thread.announced or (None, None)
    _thread.announced = None
    for listener in listeners:
        listener.add(RanGemm(kind, m, n, k, operands, device, layer, gemm))
