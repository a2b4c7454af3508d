"""Errors for uses of torch that converted layers cannot serve; each says what to do."""

from __future__ import annotations

from typing import NoReturn

from torch import nn


def refuse_script(module: nn.Module) -> NoReturn:
    """Raise TypeError: TorchScript cannot compile ``module``, whose code is Python on ops of this package."""
    raise TypeError(
        f"torch.jit.script needs layers of plain torch; got a {type(module).__name__} of tritonfp8. Use torch.export "
        "or torch.jit.trace, which record converted layers, or call tritonfp8.revert(model) first"
    )


def refuse_forward_mode() -> NoReturn:
    """Raise RuntimeError: layers of this package have no forward-mode derivative."""
    raise RuntimeError(
        "a layer of tritonfp8 has no forward-mode derivative (torch.func.jvp, jacfwd, hessian, "
        "torch.autograd.forward_ad): use reverse mode (torch.func.grad, vjp, jacrev), or call tritonfp8.revert(model) "
        "first"
    )


def refuse_transform(what: str, hint: str) -> NoReturn:
    """Raise RuntimeError: ``what`` does not work inside a transform of ``torch.func``; ``hint`` says what to do."""
    raise RuntimeError(
        f"torch.func (grad, vmap, jacrev, ...) and forward-mode derivatives need layers of tritonfp8 on plain, whole "
        f"tensors; got {what}. {hint}, or call tritonfp8.revert(model) first"
    )


def refuse_compiled_transform() -> NoReturn:
    """Raise NotImplementedError, at which ``torch.compile`` leaves its graph, and the layer runs in eager mode."""
    raise NotImplementedError(
        "torch.compile cannot record a layer of tritonfp8 inside torch.func.grad, vjp or jacrev. Compile without "
        "fullgraph=True, so that the layer runs in eager mode, or call tritonfp8.revert(model) first"
    )
