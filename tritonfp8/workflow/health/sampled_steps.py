"""Samples of every N-th optimizer step, for the callbacks of trainers, which tell where a step begins and ends."""

from __future__ import annotations

from torch import nn

from tritonfp8.specs.checks import require_int
from tritonfp8.workflow.health.monitoring import Monitor, monitor


class SampledSteps:
    """Opens a block of :func:`tritonfp8.monitor` for each sampled step, and no longer.

    A trainer evaluates and saves between two steps, where a block that stays open would measure another forward.

    Args:
        every: optimizer steps from one sample to the next, at least 1; None samples nothing.

    Raises:
        ValueError: ``every`` is below 1.
        TypeError: ``every`` is no int.
    """

    def __init__(self, every: int | None) -> None:
        if every is not None:
            require_int("health_every", every, 1)
        self.every = every
        self._monitor: Monitor | None = None
        self._model: nn.Module | None = None
        self._is_open = False

    def begin(self, model: nn.Module, step: int) -> None:
        """A step begins, counted from 0. Its micro-batches after the first one may say so, too."""
        if self.every is None or step % self.every:
            self.close()
            return
        if self._is_open:
            if self._monitor is not None and self._monitor.next_step == step:
                return
            self.close()
        if self._monitor is None or self._model is not model:
            self._monitor, self._model = monitor(model, self.every), model
        self._monitor.next_step = step
        self._monitor.__enter__()
        self._is_open = True

    def end(self) -> dict[str, float | str]:
        """The step has ended: its figures, as :meth:`Monitor.summary` names them; empty for a step without a sample."""
        if not self._is_open or self._monitor is None:
            return {}
        self._is_open = False
        self._monitor.__exit__(None, None, None)
        found = self._monitor.summary()
        # A long training would fill the memory.
        self._monitor.clear()
        return found

    def close(self) -> None:
        """Remove the hooks of a step that did not end: an error left it."""
        if self._is_open and self._monitor is not None:
            self._is_open = False
            self._monitor.__exit__(RuntimeError, None, None)
            self._monitor.clear()
