"""Views of the values of a stored weight: they read its codes at each use, and a write to one is rounded into them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tritonfp8.compat import torch_private
from tritonfp8.layers.stored.base import CodesTensor
from tritonfp8.layers.stored.direct import on_values

Step = Callable[[Tensor], Tensor]


def _aliases(func: Any) -> bool:
    """Whether ``func`` returns a view of its first argument."""
    returns = func._schema.returns
    if len(returns) != 1 or str(returns[0].type) != "Tensor":
        return False
    alias = returns[0].alias_info
    return alias is not None and not alias.is_write


class ValuesView(CodesTensor):
    """What ``weight.view(-1)``, ``weight[:n]`` and other views of a stored weight return.

    It has no values of its own. Each operation computes them from the codes, as long as it runs. An operation that
    writes to it rounds the values of the weight again, as one that writes to the weight does.

    Args:
        base: the stored weight, whole.
        step: makes the view of the weight's values.
        values: the view; only its shape, strides and dtype are read.
    """

    _base_weight: Any
    _step: Step

    @staticmethod
    def __new__(cls, base: Tensor, step: Step, values: Tensor) -> ValuesView:
        """A tensor of this type, without data of its own."""
        return Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), dtype=values.dtype, device=values.device
        )

    def __init__(self, base: Tensor, step: Step, values: Tensor) -> None:
        self._base_weight, self._step = base, step

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ValuesView({tuple(self.shape)}, {self.dtype}, of {self._base_weight!r})"

    def _inner(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._base_weight._inner()
        return found

    def _plain(self, dtype: torch.dtype) -> Tensor:
        return self._step(self._base_weight.plain_values(dtype))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A copy of a view is a plain tensor, as torch copies it.
        return self.detach().clone().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, ValuesView) and _aliases(func):
            return view_of(first._base_weight, func, args[1:], options, first._step)
        return on_values(func, args, options)


def view_of(base: Any, func: Any, args: Any, options: Any, before: Step = lambda values: values) -> Tensor | None:
    """``func(values, *args)`` of the values of a stored weight, if that is a view; else None.

    Inside a compiled graph, which writes to no weight, it is a plain tensor.
    """
    if not _aliases(func):
        return None
    frame = inspect.currentframe()
    if torch_private.is_called_by(torch_private.FSDP1, None if frame is None else frame.f_back):
        raise NotImplementedError(
            "FullyShardedDataParallel (FSDP version 1) joins the values of all weights in one tensor of high "
            "precision, so it cannot shard weights that are stored in 8 bits: use torch.distributed.fsdp.fully_shard "
            "(FSDP2); with accelerate, fsdp_version: 2"
        )

    def step(values: Tensor) -> Tensor:
        found: Tensor = func(before(values), *args, **options)
        return found

    if torch.compiler.is_compiling():
        return step(base.plain_values())
    return ValuesView(base, step, step(base.plain_values()))
