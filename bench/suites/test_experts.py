"""A mixture of experts, forward and backward, compiled: time and peak memory of recipes, and of bf16 by torch."""

import pytest
import torch

import tritonfp8
from bench.contest import gates
from bench.contest.cases import LAYER_RECIPES
from bench.contest.compare import Contender, measures
from bench.contest.grouped import EXPERTS, EXPERTS_KERNELS
from bench.contest.peers import compiled
from bench.models import LoopedExperts, TorchExperts, mixture, training_step

# Compiling takes longer than measuring.
pytestmark = pytest.mark.timeout(1200)
BF16, TORCH = "bf16", "torch bf16"


def by_expert(results):
    """``results`` with each expert's part by itself: in double precision a whole gradient would not fit."""
    return {
        f"{name} {i}" if x.ndim == 3 else name: part
        for name, x in results.items()
        for i, part in enumerate(x if x.ndim == 3 else (x,))
    }


def inputs(shape, device):
    """Hidden states, which need a gradient, and the gradient of the output."""
    tokens, _, _, hidden, _ = shape.size
    x, grad_output = (torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16) for _ in range(2))
    return x.requires_grad_(), grad_output


def close_experts(shape, x, grad_output):
    """A check of the results of a step against the results of a loop over the experts in bf16."""
    layer = mixture(shape, x.device, LoopedExperts)
    expected = training_step(layer, layer, x, grad_output)()
    check = gates.close_model(by_expert(expected))
    return lambda results: check(by_expert(results))


def flops(shape):
    """FLOPs of the experts: two linear layers in three GEMMs each; the first has a gate."""
    tokens, top_k, _, hidden, intermediate = shape.size
    return 3 * 2 * tokens * top_k * 3 * hidden * intermediate


def contenders_on(contest, shape):
    """Our experts of each recipe and of bf16, and torch's in bf16."""
    device = contest.device.device
    x, grad_output = inputs(shape, device)
    check = close_experts(shape, x, grad_output)
    work = {"flops": flops(shape)}

    def contender(name, experts, recipe, own):
        def make():
            layer = mixture(shape, device, experts, recipe)
            return training_step(compiled(layer, contest.smoke), layer, x, grad_output)

        return Contender(name, make, check, own=own, peer=None if name == TORCH else TORCH, fields=work)

    contenders = [contender(name, tritonfp8.Float8Experts, name, own=True) for name in (*LAYER_RECIPES, BF16)]
    return [*contenders, contender(TORCH, TorchExperts, BF16, own=False)]


@measures("experts", (EXPERTS,))
def test_experts(benchmark, contest, case, shape):
    contest(benchmark, case, shape, contenders_on(contest, shape), contest.device.settled_seconds)


# Last, because the profiler slows later launches.
@measures("experts", (EXPERTS_KERNELS,))
def test_kernels(contest, case, shape):
    contest.break_down(case, shape, contenders_on(contest, shape))
