"""A prototype of delayed scaling beside tensorwise and blockwise: ``python -m bench.training.delayed``.

Delayed scaling (Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433) quantizes a tensor by amaxes of
earlier steps. So it saves the pass over each tensor that tensorwise scaling needs to find the amax. In the prototype a
cast takes its amax from a history, and finds the amax of its tensor on the way. At the end of a step, a few launches
for all operands together write the history and find the amaxes of the next step. What a recipe of the package would
need beside that, such as one collective over ranks, is not there: a real one takes longer.

Trains Llama layers, each compiled, in turns in bf16, tensorwise, blockwise and by this prototype.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import tritonfp8
from bench import shapes
from bench.contest.machine import output_path, write_results
from bench.models import llama
from bench.training.delayed_kernel import delayed_kernel
from tritonfp8.formats import FORMATS
from tritonfp8.kernels.cast import quantize as quantize_kernels
from tritonfp8.launch import cast
from tritonfp8.launch.executor import planned
from tritonfp8.launch.plan import Planner, View
from tritonfp8.layers.linear import NO_PAIR, Pair, operands
from tritonfp8.ops import graph_op
from tritonfp8.specs import QuantSpec, spec_of
from tritonfp8.training.timers import now, seconds_between

PROTOTYPE = "delayed"
CONTENDERS = ("bf16", "tensorwise", "blockwise", PROTOTYPE)
ROUNDS = 30
# By its name, torch knows that the graphs of tensorwise do not serve the prototype.
DELAYED = dataclasses.replace(tritonfp8.recipes.get("tensorwise"), name="delayed")


class History:
    """The amaxes of all casts of a step, in the order of the casts, which is that of every step.

    Args:
        device: where the casts run.
        casts: casts of a step, at most.
        steps: steps whose largest amax a cast is scaled by.
    """

    # So many elements an entry: Triton compiles other code for pointers that are not aligned to 16 bytes.
    STRIDE = 4

    def __init__(self, device: torch.device, casts: int = 4096, steps: int = 16) -> None:
        self.present = torch.zeros(casts, self.STRIDE, device=device)
        self.scaled_by = torch.zeros(casts, self.STRIDE, device=device)
        self.past = torch.zeros(steps, casts, self.STRIDE, device=device)
        self.casts = self.steps = 0

    def next(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of the next cast: the amax to scale by ``[1, 1, 1]``, and where to write that of ``x`` (int32 ``[1]``)."""
        index, self.casts = self.casts, self.casts + 1
        if self.steps == 0:
            self.scaled_by[index, 0] = x.abs().amax()
        return self.scaled_by[index, :1].view(1, 1, 1), self.present[index, :1].view(torch.int32)

    def end_step(self) -> None:
        """Write the history, and find the amaxes of the next step."""
        self.past[self.steps % len(self.past)] = self.present
        self.scaled_by = self.past.amax(0)
        self.present.zero_()
        self.casts, self.steps = 0, self.steps + 1


_history: History | None = None


def plan_delayed(plan: Planner, x: View, amax: View, found: View, spec: str | None, spec_t: str | None) -> list[View]:
    """The plan of :func:`tritonfp8.launch.cast.quantize_both` by one given amax, for either result or both.

    The kernel also writes the amax of ``x`` into ``found``.
    """
    side, side_t = (
        None if each is None else cast.new_side(plan, x.shape, spec_of(each), transpose, amax.retyped(torch.int32))
        for each, transpose in ((spec, False), (spec_t, True))
    )
    launched = _Insert(plan, found)
    cast.plan_sides(launched, x, *(None if made is None else made[0] for made in (side, side_t)))
    return [view for made in (side, side_t) if made is not None for view in made[1:]]


class _Insert:
    """A planner that launches the prototype's kernel, with one more pointer, in place of the package's."""

    def __init__(self, plan: Planner, found: View) -> None:
        self._plan, self._found = plan, found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def launch(self, kernel: Any, programs: int, pointers: tuple[View, ...], *rest: Any, **options: Any) -> None:
        assert kernel is quantize_kernels.quantize_kernel
        self._plan.launch(delayed_kernel, programs, (self._found, *pointers), *rest, **options)


@torch.library.custom_op("tritonfp8_bench::quantize_delayed", mutates_args=())
def quantize_delayed(x: Tensor, spec: str | None, spec_t: str | None) -> list[Tensor]:
    """``x`` and ``x.T`` quantized by the amax of earlier steps of this cast."""
    assert _history is not None
    results = planned(plan_delayed, (x, *_history.next(x)), (spec, spec_t))
    assert results is not None
    return list(results)


@quantize_delayed.register_fake
def _(x: Tensor, spec: str | None, spec_t: str | None) -> list[Tensor]:
    found = []
    for each, shape in ((spec, x.shape), (spec_t, x.shape[::-1])):
        if each is not None:
            found += [x.new_empty(shape, dtype=FORMATS[spec_of(each).format].dtype), x.new_empty((1, 1)).float()]
    return found


def quantize_for(x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> tuple[Pair, Pair]:
    """:func:`tritonfp8.layers.linear.operands.quantize_for` by amaxes of earlier steps."""
    found = quantize_delayed(x, *(None if each is None else each.args[0] for each in (spec, spec_t)))
    pairs = iter(zip(found[::2], found[1::2], strict=True))
    first, second = (NO_PAIR if each is None else next(pairs) for each in (spec, spec_t))
    return first, second


def grad_output_and_sum(
    provider: operands.OperandProvider, x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None
) -> tuple[Pair, Pair, Tensor]:
    """:meth:`OperandProvider.grad_output_and_sum` by amaxes of earlier steps."""
    return *quantize_for(x, spec, spec_t), x.sum(0)


@contextlib.contextmanager
def delayed(history: History | None) -> Iterator[None]:
    """Quantize the operands of linear layers by amaxes of earlier steps; None changes nothing."""
    global _history
    if history is None:
        yield
        return
    _history = history
    # CODE is an argument in the graph: else torch would take graphs of other code for it.
    with (
        mock.patch.object(operands, "quantize_for", quantize_for),
        mock.patch.object(operands.OperandProvider, "grad_output_and_sum", grad_output_and_sum),
        mock.patch.object(graph_op, "CODE", PROTOTYPE),
    ):
        yield
        history.end_step()


def step_of(shape: shapes.Shape, name: str) -> Callable[[], None]:
    """A training step without an optimizer, compiled layer by layer."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _, hidden, *_, batch, sequence = shape.size
    model = llama(shape, device)
    if name != "bf16":
        tritonfp8.convert(model, DELAYED if name == PROTOTYPE else name)
    for layer in model.layers:
        layer.compile(fullgraph=True, dynamic=False)
    x = torch.randn(batch, sequence, hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    grad_output = torch.randn_like(x)
    parameters = list(model.layers.parameters())
    history = History(device) if name == PROTOTYPE else None

    def step() -> None:
        with delayed(history):
            torch.autograd.grad(model(x), (x, *parameters), grad_output)

    step()
    step()
    return step


def measure(shape: shapes.Shape, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of a step of each contender, measured in turns, and GPU seconds of its kernels."""
    torch.compiler.reset()
    # A cached graph knows nothing of the prototype's other casts.
    torch._inductor.config.force_disable_caches = True
    torch._dynamo.config.recompile_limit = 4 * len(CONTENDERS)
    steps = {name: step_of(shape, name) for name in CONTENDERS}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, step in steps.items():
            begin = now(device)
            step()
            end = now(device)
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(seconds_between(begin, end))
    kernels = {name: kernel_seconds(step) for name, step in steps.items()}
    return {name: statistics.median(each) for name, each in times.items()}, kernels


def kernel_seconds(step: Callable[[], None], steps: int = 5) -> float:
    """GPU seconds of the kernels of a step, without the gaps in which the GPU waits for the host; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0.0
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    kernels = (event for event in profiler.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA)
    return sum(event.self_device_time_total for event in kernels if not event.is_user_annotation) / 1e6 / steps


def main() -> None:
    """Measure, print, write."""
    out = output_path("delayed", __doc__)
    rows = []
    for shape in shapes.select("model", ["models"]):
        print(f"{shape.name}: the prototype over the better of tensorwise and blockwise")
        row: dict[str, Any] = {"shape": shape.name, "size": shape.size}
        for kind, seconds in zip(("seconds", "kernel_seconds"), measure(shape, ROUNDS), strict=True):
            best = min(seconds["tensorwise"], seconds["blockwise"])
            row |= {kind: seconds, f"gain_in_{kind}": best / seconds[PROTOTYPE] - 1 if seconds[PROTOTYPE] else None}
            print(f"  {kind}:", ", ".join(f"{name} {1e3 * each:.2f} ms" for name, each in seconds.items()))
            print(f"    {row[f'gain_in_{kind}']}")
        rows.append(row)
    write_results(out, {"unit": "seconds a step", "rows": rows})


if __name__ == "__main__":
    main()
