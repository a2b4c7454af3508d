"""A linear layer, forward and backward, compiled: every recipe against bf16 and torchao, in the same rounds."""

import pytest
import torch
from torch import nn

import tritonfp8
from bench.contest import gates
from bench.contest.cases import LAYER, LAYER_KERNELS, LAYER_RECIPES, gemm_flops, recipe_variants
from bench.contest.compare import Contender, measures
from bench.contest.peers import TORCHAO_RECIPES, compiled, torchao_layers

# Compiling takes longer than measuring.
pytestmark = pytest.mark.timeout(1200)


def training_step(layer, x, grad_output, smoke):
    """The timed function: output, grad_input and grad_weight, without accumulation into earlier gradients.

    Backward runs on the calling thread. By default autograd uses a thread of its own; on some hosts its wake-up
    sometimes takes longer than a small layer. A model pays that once a step, not once a layer.
    """
    weight = next(layer.parameters())
    forward = compiled(layer, smoke)

    def step():
        with torch.autograd.set_multithreading_enabled(False):
            out = forward(x)
            return out, *torch.autograd.grad(out, (x, weight), grad_output)

    return step


def contenders_on(contest, shape):
    m, k, n = shape.size
    options = {"device": contest.device.device, "dtype": torch.bfloat16}
    x = torch.randn(m, k, **options).requires_grad_()
    weight = torch.randn(n, k, **options)
    grad_output = torch.randn(m, n, **options)
    work = {"flops": len(tritonfp8.recipes.GEMMS) * gemm_flops(m, n, k)}

    def make(convert):
        layer = nn.Linear(k, n, bias=False, **options)
        layer.weight.data.copy_(weight)
        return training_step(convert(layer), x, grad_output, contest.smoke)

    def own(recipe):
        def convert(layer):
            tritonfp8.convert(layer, recipe)
            return layer

        return convert

    def torchao(recipe):
        # torchao replaces the children of a module, not the module itself.
        return lambda layer: torchao_layers(nn.Sequential(layer), recipe)

    contenders = [
        Contender(
            name,
            lambda recipe=recipe: make(own(recipe)),
            gates.close_layer(recipe, x, weight, grad_output),
            own=True,
            peer="bf16",
            fields=work,
        )
        for name, recipe in recipe_variants(LAYER_RECIPES).items()
    ]
    contenders.append(Contender("bf16", lambda: make(lambda layer: layer), fields=work))
    contenders += [
        Contender(f"torchao {recipe}", lambda recipe=recipe: make(torchao(recipe)), peer="bf16", fields=work)
        for recipe in TORCHAO_RECIPES
    ]
    return contenders


@measures("layer", (LAYER,))
def test_linear(benchmark, contest, case, shape):
    contest(benchmark, case, shape, contenders_on(contest, shape), contest.device.settled_seconds)


# Last, because the profiler slows later launches.
@measures("layer", (LAYER_KERNELS,))
def test_kernels(contest, case, shape):
    contest.break_down(case, shape, contenders_on(contest, shape))
