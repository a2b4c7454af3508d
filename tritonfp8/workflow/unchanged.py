"""Run a model forward and backward, and leave nothing of it changed."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_SCALARS = (bool, int, float, str, type(None))


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore gradients, buffers, training flags, plain attributes and random numbers after the block.

    Hooks that run when a gradient is accumulated are paused: they may hold an optimizer that steps in backward.
    Compiled functions run eagerly inside the block.
    """
    with contextlib.ExitStack() as stack:
        for part in (_random_numbers, _attributes, _buffers, _gradients, _accumulation_hooks):
            stack.enter_context(part(model))
        # Before something was compiled, there is nothing to run eagerly, and the import would take seconds.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        # Casts that autocast keeps from before would hide whose weights they are, and those from here have a graph that
        # backward has freed.
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            torch.clear_autocast_cache()


@contextlib.contextmanager
def _random_numbers(model: nn.Module) -> Iterator[None]:
    devices = {p.device for p in (*model.parameters(), *model.buffers()) if p.device.type == "cuda"}
    numpy: Any = sys.modules.get("numpy")
    state, numpy_state = random.getstate(), None if numpy is None else numpy.random.get_state()
    with torch.random.fork_rng(sorted(device.index for device in devices)):
        try:
            yield
        finally:
            random.setstate(state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def _attributes(model: nn.Module) -> Iterator[None]:
    """Restore ``training`` of every module, and the numbers, texts and flags of modules that are not torch's own."""

    def scalars(module: nn.Module) -> dict[str, Any]:
        # DDP and FSDP keep their own counts in step with what runs in backward.
        if type(module).__module__.startswith("torch."):
            return {"training": module.training}
        return {name: value for name, value in module.__dict__.items() if isinstance(value, _SCALARS)}

    before = [(module, scalars(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, values in before:
            module.__dict__.update(values)


@contextlib.contextmanager
def _buffers(model: nn.Module) -> Iterator[None]:
    before = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, values in before:
                module._buffers[name] = buffer
                # A write would count as a change for graphs that saved the buffer before.
                if buffer is not None and values is not None and not torch.equal(buffer, values):
                    buffer.copy_(values)


@contextlib.contextmanager
def _gradients(model: nn.Module) -> Iterator[None]:
    parameters = list(model.parameters())
    before = [parameter.grad for parameter in parameters]
    # The gradients of DDP are views of its buckets, which backward fills again.
    in_buckets = any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules())
    values = [None if grad is None or not in_buckets else grad.clone() for grad in before]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        with torch.no_grad():
            for parameter, grad, value in zip(parameters, before, values, strict=True):
                parameter.grad = grad
                if grad is not None and value is not None:
                    grad.copy_(value)


@contextlib.contextmanager
def _accumulation_hooks(model: nn.Module) -> Iterator[None]:
    """Pause hooks of ``register_post_accumulate_grad_hook``: autograd keeps the dictionary, which is emptied."""
    found: list[dict[Any, Any]] = [
        hooks for p in model.parameters() if (hooks := getattr(p, "_post_accumulate_grad_hooks", None))
    ]
    before = [dict(hooks) for hooks in found]
    try:
        for hooks in found:
            hooks.clear()
        yield
    finally:
        for hooks, kept in zip(found, before, strict=True):
            hooks.update(kept)
