"""Operations of others on the values of stored weights: they read values, and what they write is rounded into codes."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from tritonfp8 import ops
from tritonfp8.compat import torch_private
from tritonfp8.layers import refuse_codes
from tritonfp8.layers.stored.base import CodesTensor, decomposed

aten = torch.ops.aten
OVERWRITES = {
    aten.bernoulli_.float,
    aten.cauchy_.default,
    aten.copy_.default,
    aten.exponential_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.geometric_.default,
    aten.log_normal_.default,
    aten.normal_.default,
    aten.random_.default,
    aten.uniform_.default,
    aten.zero_.default,
    torch_private.foreach_copy,
}
"""Operations that read nothing of what they write: all values are new, so each is rounded to the nearest code."""
TRAINED = "_tritonfp8_trained"
"""An attribute of the codes of aliases and copies of a weight that requires a gradient, such as ``weight.data``."""
STEP = "_tritonfp8_step"
"""An attribute of the codes of a weight while an optimizer steps it: a :class:`StepOfWeight`."""
STORED = "a weight that is stored in 8 bits"
_COPIES = {aten.copy_.default, torch_private.foreach_copy}
# A step of trunc_normal_ up to torch 2.11: a value that was rounded to 1 in the step before would become infinite.
_UNFIT = aten.erfinv_.default
# Their classes read the memory of a parameter, or compile the step.
_FOREIGN = {"bitsandbytes": "bitsandbytes", "torchao": "torchao"}


@dataclass(frozen=True)
class DirectSteps:
    """Writes to the values of stored weights that did not come from an optimizer of this package.

    Attributes:
        steps: the steps of other optimizers.
        unchanged: how many of them changed no code.
        share: of the codes that the last step changed, at most. A code counts each time that an operation changes it.
        writes: the operations outside of a step: copies, initializations, averages, and all others.
        unchanged_writes: how many of them changed no code.

    Of sharded weights each rank counts its own codes; a rank that has none counts no step.
    """

    steps: int = 0
    unchanged: int = 0
    share: float = 0.0
    writes: int = 0
    unchanged_writes: int = 0


# A number of steps in the groups of an optimizer, which are a part of its state_dict: SGD has no other.
_STEPS = "tritonfp8_steps"


class StepOfWeight:
    """A step of an optimizer, whose operations on a weight round at random.

    The random bits depend on the number of the step, the position of the weight in the optimizer, and the operation: a
    run that goes on from a checkpoint gets the same ones, on any mesh.

    Attributes:
        writes: the operations so far.
    """

    def __init__(self, number: Any, position: int) -> None:
        self._number, self._position, self.writes = number, position, 0

    def keys(self, device: torch.device) -> Tensor:
        """The keys of the random bits of the next operation, int32 ``[2]``."""
        # The host does not read a tensor on the device.
        number = self._number if isinstance(self._number, Tensor) else torch.tensor(self._number)
        steps, weights = number.to(device, torch.float64).reshape(1), torch.full((1,), self._position, device=device)
        self.writes += 1
        return ops.rounding_keys(self.writes, steps, weights)[0]


class _Counts:
    """Counts of this process."""

    def __init__(self) -> None:
        self.steps, self.unchanged, self.share, self.writes = 0, 0, 0.0, 0
        self.is_stepping = False
        self.changed: list[Tensor] = []
        self.sizes: dict[int, int] = {}
        # By device, where they are added: a write does not wait for the device.
        self.unchanged_writes: dict[torch.device, Tensor] = {}

    def note(self, weight: Tensor, changed: Tensor) -> None:
        """Count a write that changed so many codes."""
        if self.is_stepping:
            self.changed.append(changed)
            self.sizes[id(weight)] = weight.numel()
            return
        self.writes += 1
        before = self.unchanged_writes.get(changed.device)
        self.unchanged_writes[changed.device] = (changed == 0) + (0 if before is None else before)

    def begin(self) -> None:
        """Called before a step of any optimizer."""
        self.is_stepping, self.changed, self.sizes = True, [], {}

    def end(self, optimizer: Any) -> None:
        """Called after a step of any optimizer. The host waits for the device."""
        self.is_stepping = False
        if not self.changed:
            return
        changed, total = sum(int(x) for x in self.changed), sum(self.sizes.values())
        self.changed, self.sizes = [], {}
        if not total:
            return
        self.steps, self.unchanged, self.share = (
            self.steps + 1,
            self.unchanged + (changed == 0),
            min(1.0, changed / total),
        )
        if self.steps == 1:
            warnings.warn(
                f"{type(optimizer).__name__} writes to weights that are stored in 8 bits, and each of its operations "
                f"computes their values and rounds at random: at most {100 * self.share:.2f} % of their codes changed "
                "in this step. tritonfp8.optim.AdamW rounds once a step and has no values in memory; "
                f"tritonfp8.optim.with_masters({type(optimizer).__name__}) steps values in float32",
                stacklevel=2,
            )


_counts = _Counts()
# The DTensor of each part that an optimizer steps, by id of the part: an operation on a part does not know with which
# ranks it shares scales.
_owners: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
_writers: list[Callable[[Sequence[Tensor], Sequence[Tensor]], None]] = []


def register_writer(write: Callable[[Sequence[Tensor], Sequence[Tensor]], None]) -> None:
    """Let :func:`on_values` store values by ``write(weights, values of this rank's parts)``, rounded at random."""
    _writers[:] = [write]


@torch_private.outside_graphs  # type: ignore[untyped-decorator]
def _begin(optimizer: Any, *args: object) -> None:
    _counts.begin()
    _owners.clear()
    every = ((group, param) for group in optimizer.param_groups for param in group["params"])
    for position, (group, param) in enumerate(every):
        part = _part(param)
        if part is None:
            continue
        _refuse_step(optimizer, param, part)
        if part is not param:
            _owners[id(part)] = param
        number = _state(optimizer, param).get("step", group.get(_STEPS, 0))
        setattr(part._qdata, STEP, StepOfWeight(number, position))


def _part(param: Tensor) -> Any:
    """The codes that this rank has of a stored parameter; None of any other parameter."""
    part = getattr(param, "_local_tensor", param)
    return part if isinstance(part, CodesTensor) else None


def _state(optimizer: Any, param: Tensor) -> Any:
    # A look-up by key would give the parameter a state.
    return optimizer.state.get(param, {})


def _refuse_step(optimizer: Any, param: Tensor, part: Any) -> None:
    package = _FOREIGN.get(type(optimizer).__module__.partition(".")[0])
    if not (param.requires_grad or param.grad is not None):
        return
    if package is not None:
        _counts.is_stepping = False
        raise TypeError(
            f"{type(optimizer).__name__} of {package} cannot step a weight {tuple(param.shape)} that is stored in 8 "
            "bits: use tritonfp8.optim.AdamW (moments='fp8' keeps its state in 8 bits), or "
            "tritonfp8.optim.with_masters with an optimizer of torch; or give it the other parameters only"
        )


@torch_private.outside_graphs  # type: ignore[untyped-decorator]
def _end(optimizer: Any, *args: object) -> None:
    _owners.clear()
    for group in optimizer.param_groups:
        is_counted = False
        for param in group["params"]:
            step = None if (part := _part(param)) is None else vars(part._qdata).pop(STEP, None)
            is_counted |= step is not None and step.writes > 0 and "step" not in _state(optimizer, param)
        if is_counted:
            group[_STEPS] = group.get(_STEPS, 0) + 1
    _counts.end(optimizer)


register_optimizer_step_pre_hook(_begin)
register_optimizer_step_post_hook(_end)


def direct_steps() -> DirectSteps:
    """The writes of this process to the values of stored weights. The host waits for the device."""
    c = _counts
    idle = sum(int(x) for x in c.unchanged_writes.values())
    return DirectSteps(c.steps, c.unchanged, c.share, c.writes, idle)


@contextmanager
def counted(weight: Any) -> Iterator[None]:
    """Count the block, which replaces all values of a weight, as one write."""
    if weight.is_meta or torch.compiler.is_compiling():
        yield
        return
    before = [x.clone() for x in weight._both()]
    yield
    pairs = zip(weight._both(), before, strict=True)
    _counts.note(weight, torch.stack([_differ(x, old) for x, old in pairs]).sum())


def _differ(x: Tensor, y: Tensor) -> Tensor:
    """How many elements differ; NaN are equal."""
    as_bytes = (each.contiguous().view(torch.uint8) for each in (x, y))
    return torch.ne(*as_bytes).sum()


def _alias_infos(func: Any) -> tuple[list[Any], list[Any]]:
    """The schema's arguments that are written, and its results that are views."""
    arguments = [a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    views = [r for r in func._schema.returns if r.alias_info is not None and not r.alias_info.is_write]
    return arguments, views


def _written(func: Any, args: Any, options: Any) -> list[Tensor]:
    names = [a.name for a in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | options
    return [x for a in _alias_infos(func)[0] for x in tree_leaves(given.get(a.name)) if isinstance(x, Tensor)]


def _is_trained(x: Any) -> bool:
    return x.requires_grad or hasattr(x._qdata, TRAINED)


def refuse_merging(weight: Any) -> None:
    """Raise NotImplementedError if peft, which merges adapters, is about to write to a frozen weight."""
    if not _is_trained(weight) and torch_private.merges_adapters(inspect.currentframe()):
        raise NotImplementedError(
            "merging adapters would round a frozen weight that is stored in 8 bits, and peft would take them out again "
            "with other values: call tritonfp8.revert(model) before model.merge_and_unload(), or write the merged "
            "weights by tritonfp8.export.save(model, folder, format, adapters='merged')"
        )


def _base(x: Any) -> Any:
    """The stored weight that a view is of; a stored weight itself."""
    return getattr(x, "_base_weight", x)


def _check(func: Any, targets: Sequence[Any], leaves: Sequence[Any]) -> None:
    """Raise NotImplementedError for what is neither a read nor a write that keeps what it writes."""
    first = next(x for x in leaves if isinstance(x, CodesTensor))
    # A change of the shape or the memory would change the values that are about to be freed.
    if func is _UNFIT or _alias_infos(func)[1] or torch.Tag.inplace_view in func.tags:
        raise first._refusal(str(func))
    for x in targets:
        refuse_merging(_base(x))
        if not (hasattr(x, "_step") or x.is_part or _is_trained(x)):
            raise x._refusal(str(func))
    for weight in map(_base, targets):
        if weight.is_part and id(weight) not in _owners:
            raise NotImplementedError(
                f"{func} does not write to a weight that is stored in 8 bits and sharded ({type(weight).__name__}): "
                "its scales depend on the whole weight. Write by load_state_dict of the model, or initialize by "
                "reset_parameters of the layer; train it by tritonfp8.optim.AdamW or tritonfp8.optim.with_masters; for "
                "an average use tritonfp8.optim.float32_copy"
            )


class _Values:
    """The values that an operation gets in place of the tensors of codes.

    Args:
        wide: compute in float32 where tensors are bfloat16: a small change is lost in that, before it is rounded to a
            code.
    """

    def __init__(self, wide: bool) -> None:
        self.wide = wide
        self.wholes: dict[int, Tensor] = {}
        self.found: dict[int, Tensor] = {}
        self.widened: list[tuple[Tensor, Tensor]] = []

    def of(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if id(x) not in self.found:
            self.found[id(x)] = self._read(x)
        return self.found[id(x)]

    def whole(self, weight: Any) -> Tensor:
        if id(weight) not in self.wholes:
            self.wholes[id(weight)] = weight.plain_values(torch.float32 if self.wide else None)
        return self.wholes[id(weight)]

    def _read(self, x: Any) -> Tensor:
        if isinstance(x, CodesTensor):
            whole = self.whole(_base(x))
            return x._step(whole) if hasattr(x, "_step") else whole
        if self.wide and x.dtype == torch.bfloat16:
            self.widened.append((x, x.float()))
            return self.widened[-1][1]
        return x


def on_values(func: Any, args: Any, options: Any) -> Any:
    """Call ``func`` on the values of stored weights and of views of them; what it writes is rounded into the codes.

    Raises:
        NotImplementedError: it returns views, or writes to a part of a weight whose scales other ranks share.
    """
    if func is aten.detach_.default:
        return args[0]
    if (found := decomposed(func, args, options)) is not NotImplemented:
        return found
    if func is ops.without_backward:
        # It ties a result to what it was computed from, and reads nothing of that.
        plain = [x for x in args if x is not None and not isinstance(x, CodesTensor)]
        return func(*plain) if len(plain) > 1 else plain[0].clone()
    leaves, written = tree_leaves((args, options)), _written(func, args, options)
    targets = [x for x in written if isinstance(x, CodesTensor)]
    if targets and func in _COPIES:
        refuse_codes(STORED, args[1])
    weights = list({id(_base(x)): _base(x) for x in targets}.values())
    if weights and (torch.compiler.is_compiling() or torch_private.is_traced()):
        raise NotImplementedError(
            f"{func} inside torch.compile writes to a weight that is stored in 8 bits, which a graph cannot: run what "
            "writes to it, such as optimizer.step(), as it is. tritonfp8.optim.AdamW steps by few kernels anyway"
        )
    _check(func, targets, leaves)
    narrow = any(weight.dtype == torch.bfloat16 for weight in weights)
    values = _Values(narrow and all(x.dtype == _base(x).dtype for x in targets))
    before = {id(weight): values.whole(weight).clone() for weight in weights}
    out = func(*tree_map(values.of, args), **tree_map(values.of, options))
    if not weights:
        return out
    for x, wide in values.widened:
        if any(x is each for each in written):
            x.copy_(wide)
    _store(func, weights, values, before)
    # torch.nn.init.eye_ writes by out=, and has no tensor as its first argument.
    return targets[0] if isinstance(out, Tensor) else out


def _store(func: Any, weights: Sequence[Any], values: _Values, before: dict[int, Tensor]) -> None:
    if func in OVERWRITES and not _counts.is_stepping:
        for weight in weights:
            weight._fill(values.whole(weight))
    else:
        # Together: ranks that share scales reduce the amaxes of all weights at once.
        owners = [_owners.get(id(weight), weight) for weight in weights]
        _writers[0](owners, [values.whole(weight) for weight in weights])
    for weight in weights:
        _counts.note(weight, (weight.plain_values(before[id(weight)].dtype) != before[id(weight)]).sum())
