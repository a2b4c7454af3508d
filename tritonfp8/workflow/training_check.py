"""``tritonfp8.verify_training``: whether one step of an optimizer moves every weight of the model that it should."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tritonfp8.layers import Fingerprints
from tritonfp8.layers.linear import require_module
from tritonfp8.specs.checks import require
from tritonfp8.specs.naming import unwrapped
from tritonfp8.workflow.outputs import local_part
from tritonfp8.workflow.verification_report import ON_FAILURE, Failure, deliver, lines_of

_logger = logging.getLogger("tritonfp8")


@dataclass(frozen=True)
class _Held:
    """A parameter of the model before the step."""

    name: str
    parameter: Tensor
    checksum: Tensor


class TrainingCheck:
    """The context manager that :func:`verify_training` returns; its attributes are filled when the block ends.

    Attributes:
        steps: how many optimizers stepped, times their steps.
        moved: the trainable parameters that changed.
        without_gradient: the trainable parameters that got no gradient and did not change. That is no failure: the loss
            of the step may not depend on them.
        failures: each parameter that did not move, that no optimizer holds, or that is not the model's.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Any], on_failure: str) -> None:
        self._model, self._optimizers, self._on_failure = model, optimizers, on_failure
        self._fingerprints = Fingerprints()
        self._handles: list[Any] = []
        # By the id of a parameter: the largest learning rate of a step, and whether its gradients are all zeros.
        self._rates: defaultdict[int, float] = defaultdict(float)
        self._gradients: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._before: list[_Held] = []
        self.steps = 0
        self.moved: tuple[str, ...] = ()
        self.without_gradient: tuple[str, ...] = ()
        self.failures: tuple[Failure, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no failure."""
        return not self.failures

    def __enter__(self) -> TrainingCheck:
        self._before = [
            _Held(unwrapped(name), parameter, self._fingerprints.of(parameter))
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        ]
        for optimizer in self._optimizers:
            if isinstance(optimizer, Optimizer):
                self._handles.append(optimizer.register_step_pre_hook(self._note_step))
        if not self._optimizers:
            # An engine clears the gradients before the block ends.
            self._handles += [
                held.parameter.register_hook(partial(self._note, held.parameter)) for held in self._before
            ]
        return self

    def _note(self, parameter: Tensor, grad: Tensor) -> None:
        self._gradients[id(parameter)].append(_has_nonzero(grad))

    def _note_step(self, optimizer: Any, *args: Any) -> None:
        """Note the gradients and learning rates of a step that begins: the block may clear the gradients after it."""
        self.steps += 1
        self._note_all(optimizer, with_rates=True)

    def _note_all(self, optimizer: Any, with_rates: bool) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if with_rates:
                    self._rates[id(parameter)] = max(self._rates[id(parameter)], abs(float(group.get("lr", 1.0))))
                if parameter.grad is not None:
                    self._note(parameter, parameter.grad)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        if kind is not None:
            return
        for optimizer in self._optimizers:
            # A closure makes the gradients inside the step. A schedule may have changed the learning rate since then.
            self._note_all(optimizer, with_rates=not isinstance(optimizer, Optimizer))
        self._compare()
        total = f"{len(self.moved)} of {len(self._before)} trainable weights moved"
        _logger.log(logging.INFO if self.ok else logging.WARNING, "%s; failures: %d", total, len(self.failures))
        if not self.ok:
            deliver(str(self), self, self._on_failure, stacklevel=2)

    def __str__(self) -> str:
        moved = f"{len(self.moved)} of {len(self._before)} trainable weights moved in the step"
        return "\n  ".join([moved, *lines_of(self.failures)])

    def _compare(self) -> None:
        now = {unwrapped(name): parameter for name, parameter in self._model.named_parameters()}
        # A parameter may have been replaced inside the block: then the new one is compared.
        flags = {
            held.name: [
                not torch.equal(held.checksum.cpu(), self._fingerprints.of(now.get(held.name, held.parameter)).cpu()),
                id(held.parameter) in self._gradients,
                any(bool(each) for each in self._gradients[id(held.parameter)]) if held.parameter.numel() else False,
            ]
            for held in self._before
        }
        _agree_over_ranks({held.name: held.parameter for held in self._before}, flags)
        self.moved = tuple(name for name, (changed, _, _) in flags.items() if changed)
        self.without_gradient = tuple(name for name, found in flags.items() if not (found[0] or found[1]))
        rates = {held.name: self._rates.get(id(held.parameter), 0.0) for held in self._before}
        self.failures = (*self._of_optimizers(), *self._stuck(flags, rates))

    def _of_optimizers(self) -> Iterator[Failure]:
        """No step, and parameters that only the optimizers have or that they lack."""
        if not self._optimizers:
            return
        if self._no_step_ran():
            yield Failure(
                "optimizer",
                "no step ran inside the block",
                "call optimizer.step() in it; a GradScaler skips the step if a gradient is infinite",
            )
        known = {id(parameter) for parameter in self._model.parameters()}
        held = self._held_by_optimizers()
        for optimizer in self._optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for position, parameter in enumerate(group["params"]):
                    if id(parameter) not in known:
                        yield Failure(
                            f"parameter {position} of group {number} of the optimizer",
                            f"{tuple(parameter.shape)} of {parameter.dtype}, it is not a parameter of the model",
                            "make the optimizer after everything that replaces parameters (fully_shard, model.to, "
                            "resized embeddings)",
                        )
        for each in self._before:
            if id(each.parameter) not in held:
                yield Failure(
                    each.name,
                    "it is trainable, and the optimizer does not hold it",
                    "give the optimizer model.parameters(), or freeze it: requires_grad_(False)",
                )

    def _held_by_optimizers(self) -> set[int]:
        return {id(p) for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]}

    def _no_step_ran(self) -> bool:
        return not self.steps and all(isinstance(optimizer, Optimizer) for optimizer in self._optimizers)

    def _stuck(self, flags: Mapping[str, Sequence[bool]], rates: Mapping[str, float]) -> Iterator[Failure]:
        if self._optimizers and self._no_step_ran():
            return
        held = self._held_by_optimizers()
        for each in self._before:
            changed, has_gradient, nonzero = flags[each.name]
            if changed or not has_gradient or (self._optimizers and id(each.parameter) not in held):
                continue
            rate = rates[each.name] if self._optimizers else None
            yield Failure(each.name, *_why_stuck(each.parameter, nonzero, rate))


def _why_stuck(parameter: Tensor, nonzero: bool, rate: float | None) -> tuple[str, str]:
    """The cause and the remedy of a weight that a step did not change. ``rate``: None if it is not known."""
    if rate == 0:
        return (
            "it got a gradient and did not change: its learning rate is 0",
            "check another step, if a schedule begins at 0, or give its group a learning rate",
        )
    if not nonzero:
        return (
            "it did not change: its gradient is all zeros",
            "look for what stops gradients: a dead activation, a gate at 0, inputs that do not reach it",
        )
    at = "" if rate is None else f", at a learning rate of {rate:g}"
    return (
        f"it got a gradient and did not change{at}",
        f"look whether the update is below the rounding of {parameter.dtype} (keep master weights in float32), and "
        "whether the optimizer steps on copies",
    )


def _has_nonzero(grad: Tensor) -> Tensor:
    """Whether this rank's part of a gradient has an element that is not zero, as a tensor: the host does not wait."""
    local = local_part(grad)
    values = local.coalesce().values() if local.is_sparse else local
    found: Tensor = (values != 0).any()
    return found


def _agree_over_ranks(parameters: Mapping[str, Tensor], flags: dict[str, list[bool]]) -> None:
    """Let each flag of a sharded parameter hold if it holds on a rank: a shard may have no rows that change."""
    by_mesh: defaultdict[Any, list[str]] = defaultdict(list)
    for name, parameter in parameters.items():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None:
            by_mesh[mesh].append(name)
    for mesh, names in by_mesh.items():
        table = torch.tensor([flags[name] for name in names], dtype=torch.int32, device=mesh.device_type)
        for dim in range(mesh.ndim):
            torch.distributed.all_reduce(table, torch.distributed.ReduceOp.MAX, mesh.get_group(dim))
        for name, row in zip(names, table.tolist(), strict=True):
            flags[name] = [bool(flag) for flag in row]


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer whose ``step`` changes weights. accelerate wraps it, and does not call hooks of the wrapper."""
    inner = getattr(optimizer, "optimizer", None)
    while isinstance(inner, Optimizer):
        optimizer, inner = inner, getattr(inner, "optimizer", None)
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer or have param_groups; got {type(optimizer).__name__}"
        )
    if isinstance(optimizer, Optimizer) and inner is not None:
        raise TypeError(
            f"{type(optimizer).__name__} wraps {type(inner).__name__}, which is no torch.optim.Optimizer and steps "
            "copies of the parameters: give optimizer=None, with the engine's backward and step inside the block"
        )
    return optimizer


def verify_training(
    model: nn.Module, optimizer: Any | Iterable[Any] | None, on_failure: str = "raise"
) -> TrainingCheck:
    """Check one step of an optimizer: every trainable weight that gets a gradient must change, to the bit.

        with tritonfp8.verify_training(model, optimizer):
            loss = model(batch).sum()
            loss.backward()
            optimizer.step()

    Weights are compared by checksums of their bytes on their device, so nothing is copied. Of a sharded weight (a
    DTensor, with the 8-bit all-gather, too) each rank compares its shard, and the ranks exchange the results: every
    rank must enter and leave the block.

    Args:
        model: any module.
        optimizer: the optimizer of ``model``, or several. One that wraps a torch.optim.Optimizer as its ``optimizer``
            serves, too. None for an engine that steps copies of the parameters, as DeepSpeed's: the backward pass and
            the step are both in the block, and what the optimizer holds is not checked.
        on_failure: ``"raise"`` or ``"warn"``, at the end of the block.

    Returns:
        A context manager, a :class:`TrainingCheck`, whose attributes hold what was found.

    Raises:
        VerificationError: at the end of the block, if a trainable weight got a gradient and did not change, if the
            optimizer holds a parameter that is not the model's or lacks a trainable one that is, or if no step ran. The
            message names each parameter; a learning rate of 0 and gradients of zeros have messages of their own.
        TypeError: an argument of another type.
        ValueError: another ``on_failure``.
    """
    require_module(model)
    require("on_failure", on_failure, ON_FAILURE)
    several = isinstance(optimizer, Iterable) and not hasattr(optimizer, "param_groups")
    given: Iterable[Any] = () if optimizer is None else optimizer if several else [optimizer]
    return TrainingCheck(model, [_unwrapped(each) for each in given], on_failure)
