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
