"""Views of the values of a stored weight: they read its codes at each use, and a write to one is rounded into them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tritonfp8.compat import torch_private
from tritonfp8.layers import refuse_codes
from tritonfp8.layers.stored.direct import COPIES, STORED

Step = Callable[[Tensor], Tensor]


def _aliases(func: Any) -> bool:
    """Whether ``func`` returns a view of its first argument."""
    returns = func._schema.returns
    if len(returns) != 1 or str(returns[0].type) != "Tensor":
        return False
    alias = returns[0].alias_info
    return alias is not None and not alias.is_write


def _is_written(func: Any, args: Any, options: Any, x: Tensor) -> bool:
    schema = func._schema.arguments
    written = {a.name: a.alias_info is not None and a.alias_info.is_write for a in schema}
    given = {a.name: value for a, value in zip(schema, args, strict=False)} | options
    found = [given[name] for name, is_written in written.items() if is_written and name in given]
    return any(each is x for value in found for each in (value if isinstance(value, list | tuple) else [value]))


class ValuesView(Tensor):
    """What ``weight.view(-1)``, ``weight[:n]`` and other views of a stored weight return.

    It has no values of its own. Each operation computes them from the codes, as long as it runs. An operation that
    writes to it rounds all values of the weight again, so nothing that is written is lost.

    Args:
        base: the stored weight, whole.
        step: makes the view of the weight's values.
        values: the view, of which only shape, strides and dtype are read.
    """

    _base_weight: Any
    _step: Step
    __torch_function__ = torch_private.without_torch_function

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

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        options = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, ValuesView) and _aliases(func):
            return view_of(first._base_weight, func, args[1:], options, first._step)
        if func in COPIES:
            refuse_codes(STORED, args[1])
        wholes: dict[int, Tensor] = {}

        def values(view: ValuesView) -> Tensor:
            base = view._base_weight
            return view._step(wholes.setdefault(id(base), base.dequantize()))

        found: dict[int, Tensor] = {}

        def read(view: ValuesView) -> Tensor:
            return found.setdefault(id(view), values(view))

        views: dict[int, ValuesView] = {}
        tree_map_only(ValuesView, lambda view: views.setdefault(id(view), view), (args, options))
        out = func(*tree_map_only(ValuesView, read, args), **tree_map_only(ValuesView, read, options))
        written = [view for view in views.values() if _is_written(func, args, options, view)]
        for view in written:
            view._base_weight._fill(wholes[id(view._base_weight)])
        return written[0] if written and isinstance(out, Tensor) else out


def view_of(base: Any, func: Any, args: Any, options: Any, before: Step = lambda values: values) -> Tensor | None:
    """``func(values, *args)`` of the values of a stored weight, if that is a view; else None.

    Inside a compiled graph, which writes to no weight, it is a plain tensor.
    """
    if not _aliases(func):
        return None

    def step(values: Tensor) -> Tensor:
        found: Tensor = func(before(values), *args, **options)
        return found

    if torch.compiler.is_compiling():
        return step(base.dequantize())
    return ValuesView(base, step, step(base.dequantize()))
