"""A step, forward and backward, and how long it takes: as it is launched, on the host, and on the GPU."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tritonfp8.advice.blocks import Call, tensors_of
from tritonfp8.specs.checks import first_line
from tritonfp8.training import timers
from tritonfp8.workflow import floating_tensors, own_loss

SETTLING_SECONDS, MOST_SETTLING_RUNS, RUNS, HOST_RUNS = 0.25, 300, 9, 5
WARM_RUNS = 3

Scope = contextlib.AbstractContextManager[Any]


@dataclass(frozen=True)
class Timing:
    """How long a step takes, in seconds.

    Attributes:
        seconds: of one step of many in a row.
        host_seconds: until the host has launched a step, on a GPU that waits for it.
        gpu_seconds: of the step as a CUDA graph, which the host launches at once; None if it was not captured.
        first_seconds: of the first step, in which kernels compile.
        peak_bytes: most memory beyond the model and its inputs; None on a CPU.
        why_no_graph: why the step could not be captured, or None.
    """

    seconds: float
    host_seconds: float
    gpu_seconds: float | None
    first_seconds: float
    peak_bytes: int | None
    why_no_graph: str | None = None

    @property
    def host_share(self) -> float | None:
        """Host seconds over GPU seconds; above 1 the GPU waits for the host. None without a CUDA graph."""
        return self.host_seconds / self.gpu_seconds if self.gpu_seconds else None

    def over(self, count: int) -> Timing:
        """The timing of one of ``count`` equal parts of the step."""
        gpu = None if self.gpu_seconds is None else self.gpu_seconds / count
        peak = None if self.peak_bytes is None else self.peak_bytes // count
        return Timing(self.seconds / count, self.host_seconds / count, gpu, self.first_seconds, peak, self.why_no_graph)


class Step:
    """Forward of some modules, each on its own inputs, and backward of all.

    Args:
        modules: called in turn, with ``calls``.
        calls: the arguments of each.
        autocast: the dtype of autocast, or None.
        scope: surrounds the step.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        calls: Sequence[Call],
        autocast: torch.dtype | None = None,
        scope: Scope = contextlib.nullcontext(),  # noqa: B008
    ) -> None:
        self.modules, self.calls, self.autocast, self.scope = modules, calls, autocast, scope
        self.leaves: list[Tensor] = [p for module in modules for p in module.parameters() if p.requires_grad]
        self.leaves += [x for call in calls for x in tensors_of(call) if x.requires_grad]
        self.device = next((p.device for module in modules for p in module.parameters()), torch.device("cpu"))
        self._gradients: list[Tensor] = []

    def __call__(self) -> tuple[Tensor | None, ...]:
        """Run the step; the gradients of parameters and inputs, in new tensors, as after ``zero_grad``.

        No gradients if nothing trains: then this was a forward.
        """
        with self.scope:
            return self._run()

    def _run(self) -> tuple[Tensor | None, ...]:
        results: list[Tensor] = []
        for module, (args, kwargs) in zip(self.modules, self.calls, strict=True):
            with self._autocast():
                output = module(*args, **kwargs)
            results += _differentiable(output)
        if not results:
            # A frozen layer at the beginning of a model has no backward.
            return ()
        if not self._gradients:
            # Random ones: zeros and ones take less power, and so less time.
            self._gradients = [torch.ones_like(x) if x.ndim == 0 else torch.randn_like(x) for x in results]
        return torch.autograd.grad(results, self.leaves, self._gradients, allow_unused=True)

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.autocast)


def _differentiable(output: Any) -> list[Tensor]:
    """The loss of a model's output, or else its floating tensors that carry a gradient."""
    loss = own_loss(output)
    if loss is not None and loss.requires_grad:
        return [loss]
    return [x for x in floating_tensors(output) if x.requires_grad]


def measured(step: Step, graph: bool) -> Timing:
    """Measure a step.

    Args:
        step: the step; its first call compiles.
        graph: whether to capture it as a CUDA graph, too.
    """
    before = timers.allocated(step.device)
    begin = time.perf_counter()
    step()
    timers.synchronize(step.device)
    first = time.perf_counter() - begin
    for _ in range(WARM_RUNS - 1):
        step()
    timers.synchronize(step.device)
    peak = timers.peak_bytes(step.device, before)
    host = timers.idle_host_seconds(step, step.device, HOST_RUNS)
    seconds = in_a_row(step, step.device)
    gpu, reason = _graphed_seconds(step) if graph and step.device.type == "cuda" else (None, None)
    return Timing(seconds, host, gpu, first, peak, reason)


def in_a_row(function: Callable[[], object], device: torch.device) -> float:
    """Median seconds of a call of many in a row, after enough for the clocks to settle."""
    if device.type != "cuda":
        return statistics.median(timers.wall_seconds(function) for _ in range(3))
    with torch.cuda.device(device):
        return statistics.median(timers.settled_seconds(function, RUNS, SETTLING_SECONDS, most=MOST_SETTLING_RUNS))


def _graphed_seconds(step: Step) -> tuple[float | None, str | None]:
    """Seconds of the step as a CUDA graph, or the reason why it cannot be captured."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    before = generator.clone_state()
    try:
        graph, gradients = captured(step)
        found = in_a_row(graph.replay, step.device)
        del gradients
    except RuntimeError as error:
        # The generator would stay in the state of a capture, and every later random number would raise.
        generator.graphsafe_set_state(before)
        torch.cuda.synchronize()
        return None, _cause(error)
    return found, None


def _cause(error: BaseException) -> str:
    """The error that began it, with the last line of code outside of torch."""
    while error.__context__ is not None:
        error = error.__context__
    of_torch = os.path.dirname(torch.__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(of_torch)]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return f"{first_line(error)}{where}"


def captured(function: Callable[[], Any]) -> tuple[Any, Any]:
    """``function`` as a CUDA graph, after a few calls that compile and allocate, and the results that it writes.

    A graph does not own what it reads: the caller keeps it.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_RUNS):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results
