"""Measure the blocks and layers of a model in bf16 and in recipes, and predict a step of the model from them."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tritonfp8 import recipes
from tritonfp8.advice.blocks import BlockKind, Call, LayerGroup, Shortened, calls_of, detached
from tritonfp8.advice.contenders import PLAIN, Contender, without_slower
from tritonfp8.advice.kernels import kernel_seconds, profiled
from tritonfp8.advice.result import BF16, BLOCK, GRAPH, MODEL, NONE, BlockTime, LayerTime
from tritonfp8.advice.steps import Scope, Step, Timing, measured
from tritonfp8.specs.checks import first_line
from tritonfp8.warmup import warm_up

# Blocks that run one after the other, with weights of their own, as in a model.
COPIES = 3
PROFILED_RUNS = 5

Progress = Callable[[str, int, int], object]
"""Called with the stage, its number of finished steps and of all steps."""


@dataclass(frozen=True)
class Subject:
    """A model with its inputs, to be measured.

    Attributes:
        shortened: the model with one block of each kind, on its device.
        call: its inputs.
        groups: the layers of the uncut model, alike ones together.
        autocast: the dtype of autocast, or None.
        compiler: the backend of torch.compile.
        scope: surrounds each step.
    """

    shortened: Shortened
    call: Call
    groups: Sequence[LayerGroup]
    autocast: torch.dtype | None
    compiler: str
    scope: Scope = contextlib.nullcontext()  # noqa: RUF009

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.shortened.model.parameters()).device

    def step(self, model: nn.Module) -> Step:
        """Forward and backward of the model."""
        return self.step_of([model], [self.call])

    def step_of(self, modules: Sequence[nn.Module], calls: Sequence[Call]) -> Step:
        """Forward and backward of modules, each with a copy of its call."""
        with self.scope:
            return Step(modules, [detached(call) for call in calls], self.autocast, self.scope)


@dataclass
class Measured:
    """What was measured so far, so that Ctrl-C keeps it.

    Attributes:
        layers, blocks: rows of the tables.
        steps: of the shortened model, by contender and mode.
        contenders: by name, each that could be converted.
        notes: why something is missing.
    """

    layers: list[LayerTime] = field(default_factory=list)
    blocks: list[BlockTime] = field(default_factory=list)
    steps: dict[tuple[str, str], Timing] = field(default_factory=dict)
    contenders: dict[str, Contender] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add_step(self, name: str, mode: str, timing: Timing, graph: bool) -> None:
        """Note the step of a contender; of one that is compiled by block also the CUDA graph, if ``graph``."""
        self.steps[name, mode] = timing
        if not graph or mode != BLOCK:
            return
        gpu = timing.gpu_seconds
        if gpu is not None:
            self.steps[name, GRAPH] = replace(timing, seconds=gpu, host_seconds=0.0)
        elif timing.why_no_graph is not None:
            self.notes.append(f"{name}: the step cannot be captured as a CUDA graph: {timing.why_no_graph}")


def measure(
    subject: Subject, contenders: Sequence[Contender], modes: Sequence[str], found: Measured, progress: Progress
) -> None:
    """Measure bf16 and each contender in each mode into ``found``."""
    model, names = subject.shortened.model, [kind.names[0] for kind in subject.shortened.kinds]
    names += [group.name for group in subject.groups]
    calls = calls_of(model, names, subject.step(model))
    groups = [group.called_with(calls[group.name]) for group in subject.groups if group.name in calls]
    kinds = [kind for kind in subject.shortened.kinds if kind.names[0] in calls]
    _compile_ahead(groups, contenders, subject.device, progress)
    chosen = [PLAIN, *_with_fewer_layers(subject, groups, calls, contenders, found, progress)]
    for done, each in enumerate(chosen):
        progress("blocks and steps", done, len(chosen))
        for mode in compiled_modes(modes):
            _measure_mode(subject, each, mode, kinds, calls, GRAPH in modes, found)
        found.contenders[each.name] = each
        _release(subject.device)
    progress("blocks and steps", len(chosen), len(chosen))
    if subject.device.type == "cuda":
        _tell_kernels_apart(subject, groups, calls, found)


def _measure_mode(
    subject: Subject,
    each: Contender,
    mode: str,
    kinds: Sequence[BlockKind],
    calls: dict[str, Call],
    graph: bool,
    found: Measured,
) -> None:
    """The blocks and the step of one contender in one mode."""
    model = copy.deepcopy(subject.shortened.model)
    each.convert(model)
    for kind in kinds:
        blocks = [copy.deepcopy(model.get_submodule(kind.names[0])) for _ in range(COPIES)]
        for block in blocks if mode != NONE else ():
            block.compile(backend=subject.compiler, dynamic=False)
        timing = measured(subject.step_of(blocks, [calls[kind.names[0]]] * COPIES), graph=True).over(COPIES)
        found.blocks.append(BlockTime(kind.label, len(kind.names), each.name, mode, timing))
    compile_for(model, mode, subject.shortened.kinds, subject.compiler)
    timing = measured(subject.step(model), graph and mode == BLOCK)
    found.add_step(each.name, mode, timing, graph)


def compiled_modes(modes: Sequence[str]) -> list[str]:
    """The modes to run: a CUDA graph is of a step that is compiled by block."""
    return [each for each in (NONE, BLOCK, MODEL) if each in modes or (each == BLOCK and GRAPH in modes)]


def compile_for(model: nn.Module, mode: str, kinds: Sequence[BlockKind], backend: str) -> None:
    """Compile a model in place for a mode: its blocks, or all of it."""
    if mode == MODEL or (mode in (BLOCK, GRAPH) and not kinds):
        model.compile(backend=backend, dynamic=False)
    elif mode in (BLOCK, GRAPH):
        kept = [name for kind in kinds for name in kind.names[: kind.kept]]
        for name in kept:
            model.get_submodule(name).compile(backend=backend, dynamic=False)


def _with_fewer_layers(
    subject: Subject,
    groups: Sequence[LayerGroup],
    calls: dict[str, Call],
    contenders: Sequence[Contender],
    found: Measured,
    progress: Progress,
) -> list[Contender]:
    """Measure the layers; the contenders, of one recipe also without the layers that get slower."""
    chosen: list[Contender] = []
    plain: dict[LayerGroup, float] = {}
    for done, each in enumerate([PLAIN, *contenders]):
        progress("layers", done, len(contenders) + 1)
        try:
            model = copy.deepcopy(subject.shortened.model)
            report = each.convert(model)
        except ValueError as error:
            found.notes.append(f"{each.name}: {first_line(error)}")
            continue
        times = {
            group: _layer_seconds(subject, model.get_submodule(group.name), calls[group.name])
            for group in groups
            if report is None or group.name in report.converted
        }
        found.layers += [LayerTime(g.label, g.sizes, g.count, each.name, seconds) for g, seconds in times.items()]
        plain = plain or times
        if report is not None:
            chosen += filter(None, (each, without_slower(each, times, plain)))
    progress("layers", len(contenders) + 1, len(contenders) + 1)
    return chosen


def _layer_seconds(subject: Subject, layer: nn.Module, call: Call) -> float:
    timing = measured(_layer_step(subject, layer, call), graph=True)
    return timing.gpu_seconds or timing.seconds


def _layer_step(subject: Subject, layer: nn.Module, call: Call) -> Step:
    return subject.step_of([copy.deepcopy(layer)], [call])


def _tell_kernels_apart(
    subject: Subject, groups: Sequence[LayerGroup], calls: dict[str, Call], found: Measured
) -> None:
    """Fill in the GPU time of GEMMs and casts of each layer; last, as the profiler slows every later launch."""
    by_label = {(group.label, group.sizes): group for group in groups}
    models: dict[str, Any] = {}
    for i, row in enumerate(found.layers):
        if row.contender not in models:
            models = {row.contender: copy.deepcopy(subject.shortened.model)}
            found_contender = found.contenders.get(row.contender)
            if found_contender is not None:
                found_contender.convert(models[row.contender])
        group = by_label[row.layer, row.sizes]
        step = _layer_step(subject, models[row.contender].get_submodule(group.name), calls[group.name])
        step()
        parts = kernel_seconds((name, seconds) for name, _, seconds in profiled(step, PROFILED_RUNS))
        gemms, casts = parts.get("gemm_seconds"), parts.get("cast_seconds")
        found.layers[i] = LayerTime(row.layer, row.sizes, row.count, row.contender, row.seconds, gemms, casts)


def _compile_ahead(
    groups: Sequence[LayerGroup], contenders: Sequence[Contender], device: torch.device, progress: Progress
) -> None:
    """Compile the kernels of the linear layers in parallel: one after the other takes minutes."""
    names = [each.name for each in contenders if each.name in recipes.names() and each.name != BF16]
    shapes = list(dict.fromkeys(group.mnk for group in groups if group.mnk is not None))
    if device.type == "cuda" and names and shapes:
        warm_up(shapes=shapes, recipes=names, dtype="bfloat16", device=str(device), progress=progress)


def _release(device: torch.device) -> None:
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def extended(timing: Timing, parts: Sequence[tuple[int, Timing]]) -> Timing:
    """The timing of a step with more blocks: how many of each kind, and their timing.

    The host launches one part while the GPU works on another, so the longer sum of the two counts.
    """
    counted = [(1, timing), *parts]
    host = sum(count * each.host_seconds for count, each in counted)
    gpu = sum(count * (each.gpu_seconds or each.seconds) for count, each in counted)
    known = all(each.gpu_seconds is not None for _, each in counted)
    peaks = [count * each.peak_bytes for count, each in counted if each.peak_bytes is not None]
    return replace(
        timing,
        seconds=max(host, gpu),
        host_seconds=host,
        gpu_seconds=gpu if known else None,
        # Blocks of a kind share what they compiled.
        first_seconds=sum(each.first_seconds for _, each in counted),
        peak_bytes=sum(peaks) if len(peaks) == len(counted) else None,
    )
