"""``tritonfp8.advise``: measure a model in bf16 and in recipes, or predict, and recommend one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from tritonfp8.advice.blocks import Call, Shortened, layer_groups, shortened, whole
from tritonfp8.advice.contenders import Contender, contender
from tritonfp8.advice.measure import Measured, Progress, Subject, compile_for, extended, measure
from tritonfp8.advice.predict import DEFAULT_MACHINE, WithoutData, predict
from tritonfp8.advice.recommend import recommend
from tritonfp8.advice.result import BF16, BLOCK, GRAPH, MODES, NONE, Advice, StepTime, WholeStep
from tritonfp8.advice.steps import Scope, Step, Timing, measured
from tritonfp8.compat import machine as facts
from tritonfp8.conversion import Recipes, cost
from tritonfp8.layers.linear import is_converted, require_module
from tritonfp8.specs.checks import first_line, require, require_flag

DEFAULT_RECIPES = ("rowwise", "tensorwise", "blockwise")
DEFAULT_MODES = (NONE, BLOCK, GRAPH)

Prepare = Callable[[nn.Module], nn.Module]
"""Takes a model, may be on the meta device, and returns it with weights, on its device."""


def advise(
    model: nn.Module,
    *inputs: Any,
    recipes: Sequence[Recipes] = DEFAULT_RECIPES,
    compile: Sequence[str] = DEFAULT_MODES,
    autocast: torch.dtype | None = None,
    machine: str | None = None,
    check: bool = False,
    compiler: str = "inductor",
    progress: Progress = lambda stage, done, total: None,
    prepare: Prepare | None = None,
    **kwargs: Any,
) -> Advice:
    """Whether FP8 makes the training of a model faster: by layer, by block and by step, and what to do.

    A copy of the model with one block of each kind runs forward and backward in bf16 and in each recipe, in each mode;
    the time of a step of all blocks follows from the times of these. The model itself does not change.

    Args:
        model: not converted; on a GPU, or for a prediction anywhere.
        inputs, kwargs: what it is called with. Its loss is ``outputs.loss``; without one, backward begins with random
            gradients of all floating outputs.
        recipes: names, files, :class:`~tritonfp8.Recipe` objects or mappings, as :func:`tritonfp8.convert` takes them.
        compile: what to measure: ``"none"`` (eager), ``"block"`` (each block compiled), ``"model"`` (all of it
            compiled), ``"graph"`` (blocks compiled, the step as a CUDA graph).
        autocast: the dtype of autocast around forward, for float32 weights; None for no autocast.
        machine: predict for this machine, ``"h200"`` or ``"h100"``, and measure nothing. A model that is not on a GPU
            is predicted for an H200.
        check: also measure the whole model in bf16 and as recommended. It needs the memory for that.
        compiler: the backend of ``torch.compile``.
        progress: called with a stage, its finished steps and all steps.
        prepare: for a model on the meta device: gives the copies weights, on the GPU.

    Returns:
        An :class:`Advice`. Ctrl-C ends the measurement, and what was finished is in it.

    Raises:
        ValueError: no linear layer, an unknown recipe, mode or machine, a converted model, or an output without
            gradient.
        TypeError: an argument of another type.
    """
    require_flag("check", check)
    contenders = _checked(model, recipes, compile)
    call: Call = (inputs, kwargs)
    scope: Scope = contextlib.nullcontext()
    on_gpu = prepare is not None or any(p.device.type == "cuda" for p in model.parameters())
    if machine is None and not on_gpu and compiler != "eager":
        machine = DEFAULT_MACHINE
    if machine is not None:
        require("machine", machine, tuple(cost.MACHINES))
        without_data = WithoutData()
        call, prepare, scope = without_data.call(call), without_data.model, without_data.mode
    job = _Advising(
        model, call, contenders, compile, autocast, compiler, progress, prepare or copy.deepcopy, machine, scope
    )
    return job.run(check)


def _checked(model: nn.Module, recipes: Sequence[Recipes], modes: Sequence[str]) -> list[Contender]:
    """The contenders of the recipes, if the arguments fit."""
    require_module(model)
    if isinstance(modes, str) or not modes or not all(mode in MODES for mode in modes):
        raise ValueError(f"compile must be a list of {', '.join(map(repr, MODES))}; got {modes!r}")
    if any(is_converted(module) for module in model.modules()):
        raise ValueError("the model is converted already: advise compares recipes with bf16, so revert it before")
    if not layer_groups(model):
        raise ValueError("the model has no linear layer and no experts: FP8 cannot make it faster")
    if isinstance(recipes, str):
        raise TypeError(f"recipes must be a list; got {recipes!r}")
    contenders = [contender(each) for each in recipes if each != BF16]
    if not contenders:
        raise ValueError("at least one recipe is needed to compare with bf16")
    return contenders


class _Advising:
    """A measurement, and its parts."""

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        contenders: Sequence[Contender],
        modes: Sequence[str],
        autocast: torch.dtype | None,
        compiler: str,
        progress: Progress,
        prepare: Prepare,
        machine: str | None,
        scope: Scope,
    ) -> None:
        self.model, self.call, self.contenders, self.modes = model, call, contenders, modes
        self.autocast, self.compiler, self.progress, self.prepare = autocast, compiler, progress, prepare
        self.machine, self.scope = machine, scope
        self.found = Measured()

    def run(self, check: bool) -> Advice:
        """Measure, and recommend by what was measured."""
        subject = self._subject()
        interrupted, checks = False, tuple[WholeStep, ...]()
        try:
            if self.machine is None:
                measure(subject, self.contenders, self.modes, self.found, self.progress)
            else:
                predict(subject, self.contenders, self.modes, self.machine, self.found)
        except KeyboardInterrupt:
            interrupted = True
        steps = self._steps(subject.shortened)
        tokens = max((each.sizes[0] for each in self.found.layers), default=0)
        recommendation = recommend(steps, self.found.contenders, tokens, self._weight_seconds())
        try:
            if check and self.machine is None and recommendation is not None and not interrupted:
                checks = self._check(steps, recommendation.contender, recommendation.mode)
        except KeyboardInterrupt:
            interrupted = True
        where: dict[str, Any] = (
            facts.machine(subject.device) if self.machine is None else {"name": cost.MACHINES[self.machine].name}
        )
        if subject.device.type == "cuda":
            where["launch_seconds"] = cost.launch_seconds(where["name"])
        return Advice(
            {**where, "versions": facts.versions()},
            self.machine is None,
            tokens,
            tuple(self.found.layers),
            tuple(self.found.blocks),
            tuple(steps),
            recommendation,
            checks,
            tuple(dict.fromkeys(self.found.notes)),
            interrupted,
        )

    def _weight_seconds(self) -> float:
        """Of a step, in casts of weights."""
        layers = [each for each in self.found.layers if each.contender == BF16 and len(each.sizes) == 3]
        return sum(each.count * cost.cast_seconds(2, *each.sizes[1:]) for each in layers)

    def _subject(self) -> Subject:
        """The shortened model; the whole model if it does not run without its other blocks."""
        groups = layer_groups(self.model)
        cut = shortened(self.model)
        subject = self._made(cut, groups)
        try:
            gradients = subject.step(subject.shortened.model)()
        except DataDependentOutputException as error:
            raise ValueError(
                f"the model reads the values of tensors ({error}), so it cannot be predicted: measure it on a GPU"
            ) from error
        except Exception as error:
            if all(kind.left_out == 0 for kind in cut.kinds):
                raise
            self.found.notes.append(f"the model does not run with one block of each kind: {first_line(error)}")
            subject = self._made(whole(self.model), groups)
            gradients = subject.step(subject.shortened.model)()
        if not gradients:
            raise ValueError("the output of the model carries no gradient: there is no step to measure")
        return subject

    def _made(self, cut: Shortened, groups: Any) -> Subject:
        cut = Shortened(self.prepare(cut.model).train(), cut.kinds)
        return Subject(cut, self.call, groups, self.autocast, self.compiler, self.scope)

    def _steps(self, cut: Shortened) -> list[StepTime]:
        """The predicted steps of the uncut model."""
        of_blocks = {(row.contender, row.mode, row.block): row.timing for row in self.found.blocks}

        def timing(name: str, mode: str, found: Timing) -> Timing:
            parts = []
            for kind in cut.kinds:
                block = of_blocks.get((name, BLOCK if mode == GRAPH else mode, kind.label))
                if block is not None and mode == GRAPH:
                    block = replace(block, host_seconds=0.0)
                if block is not None:
                    parts.append((kind.left_out, block))
            return extended(found, parts)

        whole_steps = {key: timing(*key, found) for key, found in self.found.steps.items()}
        plain = {mode: found.seconds for (name, mode), found in whole_steps.items() if name == BF16}
        return [
            StepTime(name, mode, found, plain[mode] / found.seconds if mode in plain else None)
            for (name, mode), found in sorted(whole_steps.items(), key=lambda each: list(MODES).index(each[0][1]))
            if mode in self.modes
        ]

    def _check(self, steps: Sequence[StepTime], name: str, mode: str) -> tuple[WholeStep, ...]:
        """The whole model, in bf16 and as recommended."""
        checks = []
        for each in dict.fromkeys((BF16, name)):
            predicted = next(row for row in steps if (row.contender, row.mode) == (each, mode))
            try:
                timing = self._whole_step(each, mode)
            except torch.cuda.OutOfMemoryError:
                self.found.notes.append(f"{each}: the whole model does not fit into the memory: not checked")
                continue
            checks.append(WholeStep(each, mode, timing, predicted.timing.seconds))
        return tuple(checks)

    def _whole_step(self, name: str, mode: str) -> Timing:
        made = whole(self.model)
        model = self.prepare(made.model).train()
        self.found.contenders[name].convert(model)
        compile_for(model, mode, made.kinds, self.compiler)
        timing = measured(Step([model], [self.call], self.autocast), graph=mode == GRAPH)
        if mode == GRAPH and timing.gpu_seconds is not None:
            return replace(timing, seconds=timing.gpu_seconds)
        torch.compiler.reset()
        return timing
