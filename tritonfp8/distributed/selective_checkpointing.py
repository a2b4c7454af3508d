"""Reads of a gathered weight are hidden from selective activation checkpointing.

Selective checkpointing counts the ops of a forward, and expects the same ones when it runs again. A forward reads its
weight from the bytes that FSDP gathered. The recompute runs in backward, for which FSDP gathered the other orientation:
it quantizes and gathers the weight again, by ops that the forward did not run. None of them is worth saving.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.utils import _python_dispatch as modes
from torch.utils import checkpoint

_SELECTIVE = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)
_R = TypeVar("_R")


def hidden_from_selective_checkpointing(function: Callable[..., _R], *args: object) -> _R:
    """``function(*args)``, whose ops are neither saved nor looked up. Other dispatch modes still see them."""
    active = modes._get_current_dispatch_mode_stack()
    if not any(isinstance(mode, _SELECTIVE) for mode in active):
        return function(*args)
    # Popping and pushing calls neither __exit__ nor __enter__, in which a mode may reset what it counted.
    _replace([mode for mode in active if not isinstance(mode, _SELECTIVE)])
    try:
        return function(*args)
    finally:
        _replace(active)


def _replace(wanted: list[modes.TorchDispatchMode]) -> None:
    for _ in modes._get_current_dispatch_mode_stack():
        modes._pop_mode()
    for mode in wanted:
        modes._push_mode(mode)
