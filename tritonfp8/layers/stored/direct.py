"""Optimizers that write to the values of stored weights. Each operation rounds to nearest, and loses small changes."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only

from tritonfp8.compat import torch_private
from tritonfp8.layers import refuse_codes

_READERS = {torch.ops.aten.add.Tensor, torch_private.foreach_add}
"""Operations that read a weight and write nothing: weight decay adds it to a gradient."""
STORED = "a weight that is stored in 8 bits"
COPIES = {torch.ops.aten.copy_.default, torch_private.foreach_copy}
# A step of trunc_normal_ up to torch 2.11: a value that was rounded to 1 in the step before would become infinite.
_UNFIT = torch.ops.aten.erfinv_.default


@dataclass(frozen=True)
class DirectSteps:
    """Steps of optimizers that write to the values of stored weights.

    Attributes:
        steps: how many there were.
        unchanged: how many of them changed no code.
        share: of the codes that the last step changed, at most. A code counts each time that an operation changes it.

    Of sharded weights each rank counts its own codes; a rank that has none counts no step.
    """

    steps: int = 0
    unchanged: int = 0
    share: float = 0.0


class _Steps:
    """Counts of this process."""

    def __init__(self) -> None:
        self.found = DirectSteps()
        self.changed: list[Tensor] = []
        self.sizes: dict[int, int] = {}

    def note(self, weight: Tensor, changed: Tensor) -> None:
        self.changed.append(changed)
        self.sizes[id(weight)] = weight.numel()

    def begin(self) -> None:
        """Called before a step of any optimizer: what was written before, by an initialization, is no part of it."""
        self.changed, self.sizes = [], {}

    def end(self, optimizer: Any) -> None:
        """Called after a step of any optimizer. The host waits for the device."""
        if not self.changed:
            return
        changed, total = sum(int(x) for x in self.changed), sum(self.sizes.values())
        self.changed, self.sizes = [], {}
        if not total:
            return
        before, share = self.found, min(1.0, changed / max(total, 1))
        self.found = DirectSteps(before.steps + 1, before.unchanged + (changed == 0), share)
        if before.steps == 0:
            warnings.warn(
                f"{type(optimizer).__name__} writes to weights that are stored in 8 bits, and each change is rounded "
                f"to nearest: at most {self.found.share:.2%} of their codes changed in this step. Use "
                f"tritonfp8.optim.AdamW, or tritonfp8.optim.with_masters({type(optimizer).__name__}). "
                "tritonfp8.optim.direct_steps() counts the steps that change nothing",
                stacklevel=2,
            )


_steps = _Steps()
# The DTensor whose part on this rank a tensor is, for the parts that an optimizer steps: an operation on a part alone
# does not know with which ranks it shares scales.
_owners: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
_writers: list[Callable[[Sequence[Tensor], Sequence[Tensor]], None]] = []


def register_writer(write: Callable[[Sequence[Tensor], Sequence[Tensor]], None]) -> None:
    """Let :func:`write_directly` store values by ``write(weights, values of this rank's parts)``."""
    _writers[:] = [write]


def _begin(optimizer: Any, *args: object) -> None:
    _steps.begin()
    _owners.clear()
    for group in optimizer.param_groups:
        for param in group["params"]:
            part = getattr(param, "_local_tensor", None)
            if hasattr(part, "spec"):
                _owners[id(part)] = param


def _end(optimizer: Any, *args: object) -> None:
    _owners.clear()
    _steps.end(optimizer)


register_optimizer_step_pre_hook(_begin)
register_optimizer_step_post_hook(_end)


def direct_steps() -> DirectSteps:
    """The steps of this process in which an optimizer wrote to the values of stored weights."""
    return _steps.found


def _written(func: Any, args: Any, options: Any) -> list[Any]:
    schema = func._schema.arguments
    flags = {argument.name: argument.alias_info is not None and argument.alias_info.is_write for argument in schema}
    given = {argument.name: x for argument, x in zip(schema, args, strict=False)} | options
    found = [given[name] for name, is_written in flags.items() if is_written and name in given]
    return [x for each in found for x in (each if isinstance(each, list | tuple) else [each])]


def is_direct(kind: type[Tensor], func: Any, args: Any, options: Any) -> bool:
    """Whether ``func`` writes to trained weights of this type, or reads one to decay it."""
    if func is _UNFIT:
        return False
    written = [x for x in _written(func, args, options) if isinstance(x, kind)]
    return func in _READERS or (len(written) > 0 and all(_owners.get(id(x), x).requires_grad for x in written))


def write_directly(kind: type[Any], func: Any, args: Any, options: Any) -> Any:
    """Call ``func`` on the values of stored weights, and round the values that it writes."""
    if func in COPIES:
        refuse_codes(STORED, args[1])
    values: dict[int, Tensor] = {}

    def read(x: Any) -> Tensor:
        return values.setdefault(id(x), x.dequantize())

    weights = {id(x): x for x in _written(func, args, options) if isinstance(x, kind)}
    before = {key: read(x).clone() for key, x in weights.items()}
    out = func(*tree_map_only(kind, read, args), **tree_map_only(kind, read, options))
    if weights:
        # Together: ranks that share scales reduce those of all weights at once.
        _writers[0]([_owners.get(key, weight) for key, weight in weights.items()], [values[key] for key in weights])
    for key, weight in weights.items():
        _steps.note(weight, (weight.dequantize() != before[key]).sum())
    if isinstance(out, Tensor) and weights:
        # torch.nn.init.eye_ writes by out=, and has no tensor as its first argument.
        return next(iter(weights.values()))
    return out
