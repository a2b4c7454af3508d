"""Any optimizer of torch on float32 copies of weights that are stored in 8 bits."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tritonfp8.compat import torch_private
from tritonfp8.layers.stored import part_to_update, plain_weight, write_values

MASTER = "master"
"""The key of the copy in the state of a weight."""


@functools.cache
def with_masters(optimizer: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """A subclass of an optimizer class that steps float32 copies of weights stored in 8 bits.

    ``with_masters(torch.optim.Adagrad)(model.parameters(), lr=1e-2)`` takes the arguments of ``torch.optim.Adagrad``.
    Each step, the optimizer steps the copies; their values, rounded to nearest, become the codes. Small changes add up
    in the copies, so nothing stalls, at 4 bytes a weight beside the optimizer's own state. Copies begin as the values
    of the codes, and lie in the state of the weights, under ``"master"``; sharded weights have sharded copies. Other
    parameters are stepped as before.

    Args:
        optimizer: a subclass of ``torch.optim.Optimizer`` whose ``step`` calls no closure more than once (not
            ``LBFGS``).

    Raises:
        TypeError: it is no optimizer class, or is ``LBFGS``.
    """
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise TypeError(f"with_masters takes an optimizer class, such as torch.optim.Adagrad; got {optimizer!r}")
    if issubclass(optimizer, torch.optim.LBFGS):
        raise TypeError("with_masters cannot step LBFGS, which evaluates the model several times in a step")
    return type(f"{optimizer.__name__}WithMasters", (_WithMasters, optimizer), {"inner": optimizer})


class _WithMasters(torch.optim.Optimizer):
    """The part of the subclass that swaps weights and copies."""

    inner: type[torch.optim.Optimizer]

    def __reduce__(self) -> Any:
        # The class has no module in which pickle could look it up.
        return _empty, (self.inner,), self.__getstate__()

    @torch_private.outside_graphs  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient. Ranks that share a weight call this together."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._swapped() as masters:
            # Without the hooks around a step: those run around ours.
            inspect.unwrap(self.inner.step)(self)
        write_values(list(masters), [masters[param].detach() for param in masters])
        return loss

    @contextmanager
    def _swapped(self) -> Iterator[dict[Tensor, nn.Parameter]]:
        """The optimizer has copies in the places of stored weights that have a gradient."""
        every = [group["params"] for group in self.param_groups]
        masters: dict[Tensor, nn.Parameter] = {}
        for params in every:
            for param in params:
                if param.grad is not None and part_to_update(param) is not None:
                    masters[param] = self._master(param)
        for master, param in ((masters[param], param) for param in masters):
            if param in self.state:
                self.state[master] = self.state.pop(param)
        for group, params in zip(self.param_groups, every, strict=True):
            group["params"] = [masters.get(param, param) for param in params]
        try:
            yield masters
        finally:
            for group, params in zip(self.param_groups, every, strict=True):
                group["params"] = params
            for param, master in masters.items():
                self.state[param] = {**self.state.pop(master, {}), MASTER: master.detach()}

    def _master(self, param: Tensor) -> nn.Parameter:
        state = self.state.get(param, {})
        # An optimizer takes a state that is not empty for its own.
        values = state.pop(MASTER) if MASTER in state else plain_weight(param.detach()).float()
        if not state:
            self.state.pop(param, None)
        master = nn.Parameter(values)
        master.grad = param.grad
        return master


def _empty(optimizer: type[torch.optim.Optimizer]) -> Any:
    found = with_masters(optimizer)  # type: ignore[arg-type]
    return found.__new__(found)
