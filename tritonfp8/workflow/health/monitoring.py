"""monitor(): measure the operands of a model every N steps, keep the figures, and warn of unhealthy ones."""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from tritonfp8.compat.counting import GemmCounts, count_gemms
from tritonfp8.conversion import fp8_share
from tritonfp8.layers.linear import require_module
from tritonfp8.specs.checks import require_int, require_type
from tritonfp8.specs.naming import repeated
from tritonfp8.workflow.health.groups import Key
from tritonfp8.workflow.health.heat_map import Sample, plot
from tritonfp8.workflow.health.observer import Observer, expert_names, layer_names
from tritonfp8.workflow.health.statistics import FIELDS
from tritonfp8.workflow.health.summary import lines_of_worst, summary_of
from tritonfp8.workflow.health.thresholds import THRESHOLDS, Finding, Threshold, findings

log = logging.getLogger("tritonfp8")

LINES = 30
"""Lines of findings that ``str(monitor)`` has at most."""
ROWS = 1024
"""Rows of an operand that are measured, unless the caller says otherwise."""


class _Pending:
    """The figures of a step on their way to the host, which does not wait for them."""

    def __init__(self, step: int, measured: Mapping[Key, Tensor]) -> None:
        self.step = step
        self._parts: list[tuple[list[Key], Tensor]] = []
        self._events: list[torch.cuda.Event] = []
        by_device: dict[torch.device, list[Key]] = {}
        for key, figures in measured.items():
            by_device.setdefault(figures.device, []).append(key)
        for device, keys in by_device.items():
            self._parts.append((keys, self._sent(torch.stack([measured[key] for key in keys]), device)))

    def _sent(self, figures: Tensor, device: torch.device) -> Tensor:
        if device.type != "cuda":
            return figures.cpu()
        # Only a copy to pinned memory leaves the host free.
        host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
        with torch.cuda.device(device):
            host.copy_(figures, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._events.append(event)
        return host

    @property
    def is_here(self) -> bool:
        return all(event.query() for event in self._events)

    def samples(self) -> Iterable[Sample]:
        """Wait for the figures."""
        for event in self._events:
            event.synchronize()
        for keys, part in self._parts:
            for (layer, operand), figures in zip(keys, part.tolist(), strict=True):
                yield Sample(self.step, layer, operand, dict(zip(FIELDS, figures, strict=True)))


class Monitor:
    """What :func:`monitor` returns: the figures of the sampled steps, and a context in which steps are sampled."""

    def __init__(
        self, model: nn.Module, every: int, rows: int, thresholds: Sequence[Threshold], first_step: int
    ) -> None:
        self.every = every
        self.next_step = first_step
        self._model = model
        self._thresholds = tuple(thresholds)
        self._observer = Observer(model, rows)
        self._samples: list[Sample] = []
        self._findings: list[Finding] = []
        self._pending: list[_Pending] = []
        self._warned: set[str] = set()
        self._open = self._is_sampling = self._has_run = False
        self._before_first = ExitStack()
        self._counts = GemmCounts()

    def __enter__(self) -> Monitor:
        if self._open:
            raise RuntimeError("this block of monitor is open already: call monitor again for another one")
        self._open = True
        self._begin()
        if not self._is_sampling and not self._has_run:
            # Without hooks: compiled code would be compiled again, or would keep them.
            self._counts = self._before_first.enter_context(count_gemms())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        self._before_first.close()
        self._end()
        if kind is None:
            self._collect(wait=True)
            if not self._samples:
                log.warning(
                    "monitor saw no layer run in a sampled step: the model was not called, or ran as a CUDA graph, or "
                    "no step of the block was a multiple of every=%d",
                    self.every,
                )

    def step(self) -> None:
        """End a training step, as ``lr_scheduler.step()`` does. Calls before the first forward do not count.

        Raises:
            RuntimeError: outside of the ``with`` block.
        """
        if not self._open:
            raise RuntimeError("stats.step() belongs into the block: with tritonfp8.monitor(model) as stats")
        ran = self._observer.has_run if self._is_sampling else bool(self._counts.calls)
        self._has_run = self._has_run or ran
        if self._has_run:
            self._before_first.close()
            self._end()
            self.next_step += 1
            self._begin()
        self._collect(wait=False)

    def _begin(self) -> None:
        if self.next_step % self.every == 0:
            self._observer.start()
            self._is_sampling = True

    def _end(self) -> None:
        if not self._is_sampling:
            return
        self._is_sampling = False
        has_run = self._observer.has_run
        measured = self._observer.stop()
        if has_run:
            self._pending.append(_Pending(self.next_step, measured))

    def _collect(self, wait: bool) -> None:
        while self._pending and (wait or self._pending[0].is_here):
            samples = list(self._pending.pop(0).samples())
            self._samples += samples
            found = [
                each
                for sample in samples
                for each in findings(sample.step, sample.layer, sample.operand, sample.figures, self._thresholds)
            ]
            self._findings += found
            self._warn(found)

    def _warn(self, found: Sequence[Finding]) -> None:
        by_layer: dict[str, list[Finding]] = {}
        for each in found:
            if each.layer not in self._warned:
                by_layer.setdefault(each.layer, []).append(each)
        self._warned.update(by_layer)
        worst = {layer: _worst(its, self._thresholds) for layer, its in by_layer.items()}
        for group in repeated((layer, (each.operand, each.problem)) for layer, each in worst.items()):
            first, count = worst[group.names[0]], sum(len(by_layer[layer]) for layer in group.names)
            more = f" ({count - 1} more of such layers: see findings)" if count > 1 else ""
            log.warning("%s%s", replace(first, layer=group.label), more)

    @property
    def samples(self) -> list[Sample]:
        """The figures so far, in the order of steps. Waits for the device."""
        self._collect(wait=True)
        return list(self._samples)

    @property
    def findings(self) -> list[Finding]:
        """Each threshold that an operand met, in each sampled step. Waits for the device."""
        self._collect(wait=True)
        return list(self._findings)

    def summary(self) -> dict[str, float | str]:
        """The last sampled step in a few figures, as the integrations log them; empty before it. Waits for the device.

        =======================  =====================================================================================
        ``fp8/worst_sqnr_db``    the lowest SQNR of an operand; left out if nothing was quantized, or nothing was lost
        ``fp8/worst_layer``      the layer of this operand, by name
        ``fp8/worst_operand``    ``"input"``, ``"weight"`` or ``"grad_output"``
        ``fp8/flushed_share``    share of elements that become zero, the mean of the quantized operands
        ``fp8/saturated_share``  share of elements that are clipped, the mean of the quantized operands
        ``fp8/flops_share``      share of the linear FLOPs in FP8 by the recipes that the model has now, as in
                                 :class:`tritonfp8.ConversionReport`
        =======================  =====================================================================================
        """
        samples = self.samples
        last = [each for each in samples if each.step == samples[-1].step]
        return summary_of(last, fp8_share(self._model)) if last else {}

    def clear(self) -> None:
        """Drop the figures and findings so far. A layer that was warned of is not warned of again."""
        self._samples, self._findings, self._pending = [], [], []

    def to_dict(self) -> dict[int, dict[str, dict[str, dict[str, float]]]]:
        """The figures by step, layer, operand and field."""
        found: dict[int, dict[str, dict[str, dict[str, float]]]] = {}
        for step, layer, operand, figures in self.samples:
            found.setdefault(step, {}).setdefault(layer, {})[operand] = dict(figures)
        return found

    def to_csv(self, path: str | Path) -> None:
        """Write a line for each step, layer and operand. Replaces the file. In a distributed run, a path a rank."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            lines = csv.writer(file)
            lines.writerow(("step", "layer", "operand", *FIELDS))
            for step, layer, operand, figures in self.samples:
                lines.writerow([step, layer, operand, *(figures[field] for field in FIELDS)])

    def to_tensorboard(self, writer: Any) -> None:
        """Write the figures by ``writer.add_scalar``, as ``health/LAYER/OPERAND/FIELD``; once, after the run."""
        for step, layer, operand, figures in self.samples:
            for field in FIELDS:
                writer.add_scalar(f"health/{layer}/{operand}/{field}", figures[field], step)

    def plot(self, path: str | Path, value: str = "sqnr", operand: str | None = None) -> None:
        """Draw a heat map of layers and steps into an image file.

        The colors of ``sqnr`` span 20 to 35 dB, in each map alike; figures below are red. The scale marks the threshold
        of the value. Where nothing was quantized, figures of the quantization are grey.

        Args:
            path: its suffix is the format, such as ``.png``.
            value: one of ``tritonfp8.workflow.health.FIELDS``.
            operand: ``"input"``, ``"weight"`` or ``"grad_output"``. Default: a map of each.

        Raises:
            ValueError: another value or operand, or no figures yet.
            ImportError: matplotlib is missing.
        """
        plot(path, self.samples, value, operand, self._thresholds)

    def __str__(self) -> str:
        samples = self.samples
        steps = {sample.step for sample in samples}
        of: dict[tuple[str, str, str], list[Finding]] = {}
        for each in self._findings:
            of.setdefault((each.layer, each.operand, each.problem), []).append(each)
        lines = [f"sampled steps: {len(steps)}; findings: {len(self._findings)}"]
        for group in repeated((layer, (operand, problem)) for layer, operand, problem in of):
            its = [each for layer in group.names for each in of[layer, *group.verdict]]
            worst = replace(_worst(its, self._thresholds), layer=group.label)
            lines.append(f"{worst} ({len(its)} findings)" if len(its) > 1 else str(worst))
        more = [f"and {len(lines) - LINES} more: see findings"] if len(lines) > LINES else []
        return "\n".join([*lines[:LINES], *more, *lines_of_worst(samples)])


def _worst(found: Sequence[Finding], thresholds: Sequence[Threshold]) -> Finding:
    """The finding of the earliest threshold, which are ordered from cause to effect; of one threshold, the farthest."""
    order = {each.name: (i, each.when) for i, each in enumerate(thresholds)}

    def rank(each: Finding) -> tuple[int, float]:
        place, when = order[each.problem]
        return place, each.value if when == "below" else -each.value

    return min(found, key=rank)


def monitor(
    model: nn.Module,
    every: int = 50,
    *,
    rows: int = ROWS,
    thresholds: Sequence[Threshold] = THRESHOLDS,
    first_step: int = 0,
) -> Monitor:
    """Measure what quantization does to the operands of each converted layer, every N training steps::

        with tritonfp8.monitor(model, every=50) as stats:
            for batch in batches:
                loss = model(batch)
                ...
                stats.step()
        stats.plot("health.png")

    A sampled step measures the input, the weight and the gradient of the output of each layer. Other steps have no
    hooks, and no statistics run in them. The steps whose number is a multiple of ``every`` are sampled. A figure beyond
    a threshold is logged as a warning by the logger ``tritonfp8``, once a layer.

    A compiled model runs eagerly in sampled steps, by ``torch.compiler.set_stance("force_eager")``. Nothing is compiled
    for that, and the compiled code is kept. A sampled step then takes the time and the memory of an eager one.

    Operands of one shape are measured together. Until then a sample keeps copies of their rows, at most 64 MiB a shape.

    Statistics are of this rank: of its shard, scaled as if the shard were the whole tensor. A CUDA graph that the
    caller captured has no hooks when it is replayed: nothing is seen.

    Each weight of converted experts is a layer, such as ``"model.layers.0.mlp.experts.down_proj"``. A figure of the
    weight is the worst expert's, from at least 128 rows of each. Tokens are measured together, once for each expert
    that they go to; a tensorwise scale is then the scale of all tokens, not of one expert's tokens.

    Args:
        model: a converted model; it may be compiled or sharded.
        every: steps from one sample to the next, at least 1.
        rows: rows of an operand that are measured; amax covers all rows.
        thresholds: when to warn, from cause to effect; ``()`` never warns.
        first_step: the number of the first step of the block, for a run that was resumed.

    Raises:
        ValueError: the model has no converted layer, or a number is out of range.
        TypeError: an argument of another type.
    """
    require_module(model)
    for name, number, least in (("every", every, 1), ("rows", rows, 1), ("first_step", first_step, 0)):
        require_int(name, number, least)
    for each in thresholds:
        require_type("a threshold", each, Threshold, "a tritonfp8.workflow.health.Threshold")
    if not layer_names(model) and not expert_names(model):
        raise ValueError("the model has no converted layer: use tritonfp8.convert first")
    return Monitor(model, every, rows, thresholds, first_step)
