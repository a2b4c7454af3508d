"""Ctrl-C inside of a change that must be whole."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C inside of the block takes effect at its end. Other threads than the main one are never interrupted."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    seen: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *args: seen.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if seen:
            handler(*seen[0])
