"""The least time that delayed scaling could take: ``python -m bench.training.delayed``.

Delayed scaling (Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433) quantizes a tensor by amaxes of
earlier steps. So it saves the pass over each tensor that tensorwise scaling needs to find the amax, and needs a
history for each operand instead. The prototype here has no history: each cast takes an amax that is known. A real one
must also find the amax of the present tensor and keep the history, so it takes longer.

Trains Llama layers, each compiled, in turns in bf16, tensorwise, blockwise and by this prototype.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from torch import Tensor

import tritonfp8
from bench import shapes
from bench.contest.machine import output_path, write_results
from bench.models import llama
from tritonfp8.formats import FORMATS
from tritonfp8.launch import cast
from tritonfp8.launch.executor import planned
from tritonfp8.launch.plan import Planner, View
from tritonfp8.layers.linear import NO_PAIR, Pair, operands
from tritonfp8.ops import graph_op
from tritonfp8.specs import QuantSpec, spec_of
from tritonfp8.training.timers import now, seconds_between

PROTOTYPE = "delayed, no history"
CONTENDERS = ("bf16", "tensorwise", "blockwise", PROTOTYPE)
ROUNDS = 30
# By its name, torch knows that the graphs of tensorwise do not serve the prototype.
DELAYED = dataclasses.replace(tritonfp8.recipes.get("tensorwise"), name="delayed")

_amaxes: dict[tuple[tuple[int, ...], str], Tensor] = {}


def plan_known(plan: Planner, x: View, amax: View, spec: str | None, spec_t: str | None) -> list[View]:
    """The plan of :func:`tritonfp8.launch.cast.quantize_both` with one known amax, for either result or both."""
    bits = amax.retyped(torch.int32)
    made = [
        None if each is None else cast._side(plan, x.shape, spec_of(each), transpose, bits)
        for each, transpose in ((spec, False), (spec_t, True))
    ]
    cast._plan_sides(plan, x, *(None if side is None else side[0] for side in made))
    return [view for side in made if side is not None for view in side[1:]]


@torch.library.custom_op("tritonfp8_bench::quantize_known", mutates_args=())
def quantize_known(x: Tensor, spec: str | None, spec_t: str | None) -> list[Tensor]:
    """``x`` and ``x.T`` quantized by the amax of the first tensor that had this shape and these specs."""
    key = (tuple(x.shape), f"{spec} {spec_t}")
    if key not in _amaxes:
        _amaxes[key] = x.abs().amax().float().reshape(1, 1, 1)
    results = planned(plan_known, (x, _amaxes[key]), (spec, spec_t))
    assert results is not None
    return list(results)


@quantize_known.register_fake
def _(x: Tensor, spec: str | None, spec_t: str | None) -> list[Tensor]:
    found = []
    for each, shape in ((spec, x.shape), (spec_t, x.shape[::-1])):
        if each is not None:
            found += [x.new_empty(shape, dtype=FORMATS[spec_of(each).format].dtype), x.new_empty((1, 1)).float()]
    return found


def quantize_for(x: Tensor, spec: QuantSpec | None, spec_t: QuantSpec | None) -> tuple[Pair, Pair]:
    """:func:`tritonfp8.layers.linear.operands.quantize_for` by amaxes that are known."""
    found = quantize_known(x, *(None if each is None else each.args[0] for each in (spec, spec_t)))
    pairs = iter(zip(found[::2], found[1::2], strict=True))
    first, second = (NO_PAIR if each is None else next(pairs) for each in (spec, spec_t))
    return first, second


@contextlib.contextmanager
def known_amaxes(active: bool) -> Iterator[None]:
    """Quantize the operands of linear layers by amaxes that are known."""
    if not active:
        yield
        return
    # CODE is an argument in the graph: else torch would take graphs of other code for it.
    with mock.patch.object(operands, "quantize_for", quantize_for), mock.patch.object(graph_op, "CODE", PROTOTYPE):
        yield


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

    def step() -> None:
        torch.autograd.grad(model(x), (x, *parameters), grad_output)

    with known_amaxes(name == PROTOTYPE):
        step()
        step()
    return step


def measure(shape: shapes.Shape, rounds: int) -> dict[str, float]:
    """Median seconds of a step of each contender, measured in turns."""
    torch.compiler.reset()
    # A cached graph knows nothing of the prototype's other casts.
    torch._inductor.config.force_disable_caches = True
    torch._dynamo.config.recompile_limit = 4 * len(CONTENDERS)
    steps = {name: step_of(shape, name) for name in CONTENDERS}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, step in steps.items():
            with known_amaxes(name == PROTOTYPE):
                begin = now(device)
                step()
                end = now(device)
                if device.type == "cuda":
                    torch.cuda.synchronize()
            times[name].append(seconds_between(begin, end))
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    """Measure, print, write."""
    out = output_path("delayed", __doc__)
    rows = []
    for shape in shapes.select("model", ["models"]):
        seconds = measure(shape, ROUNDS)
        best = min(seconds["tensorwise"], seconds["blockwise"])
        rows.append(
            {"shape": shape.name, "size": shape.size, "seconds": seconds, "gain": best / seconds[PROTOTYPE] - 1}
        )
        print(f"{shape.name}: ", ", ".join(f"{name} {1e3 * each:.2f} ms" for name, each in seconds.items()))
        print(f"  the prototype is {rows[-1]['gain']:+.1%} faster than the better of tensorwise and blockwise")
    write_results(out, {"unit": "seconds a step", "rows": rows})


if __name__ == "__main__":
    main()
