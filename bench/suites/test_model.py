"""Layers of models, forward and backward, each layer compiled: time and peak memory of recipes, bf16 and torchao."""

from typing import Any, NamedTuple

import pytest
import torch

import tritonfp8
from bench.contest import gates
from bench.contest.cases import (
    GRAPHED_MODELS,
    GRAPHED_VARIANT,
    LAYER_RECIPES,
    MODEL,
    MODEL_GRAPH,
    MODEL_KERNELS,
    MODEL_VARIANTS,
    PRECISE_VARIANTS,
    recipe_variants,
)
from bench.contest.compare import Contender, measures
from bench.contest.peers import TORCHAO_RECIPES, torchao_layers
from bench.models import build, compile_layers, inputs, training_step
from tritonfp8.advice import captured

# Compiling takes longer than measuring.
pytestmark = pytest.mark.timeout(1200)


def close_to_bf16(shape, x, grad_output):
    """A check of the results of a step against the results of the model in bf16, not compiled."""
    model = build(shape, x.device)
    return gates.close_model(training_step(model, model.layers, x, grad_output)())


class Replay(NamedTuple):
    """Replays a CUDA graph; ``step`` keeps the parameters that the graph reads, which it does not own."""

    graph: Any
    results: Any
    step: Any

    def __call__(self):
        self.graph.replay()
        return self.results


@measures("model", (MODEL_GRAPH,))
def test_graph(benchmark, contest, case, shape):
    if shape.name not in GRAPHED_MODELS:
        pytest.skip("the host does not decide how long this model takes")
    device = contest.device.device
    x, grad_output = inputs(shape, device)

    def make(recipe):
        model = build(shape, device)
        if recipe is not None:
            tritonfp8.convert(model, recipe)
        compile_layers(model, contest.smoke)
        step = training_step(model, model.layers, x, grad_output)
        return Replay(*captured(step), step) if torch.cuda.is_available() else step

    check = close_to_bf16(shape, x, grad_output)
    recipe = recipe_variants(LAYER_RECIPES)[GRAPHED_VARIANT]
    contenders = [
        Contender(GRAPHED_VARIANT, lambda: make(recipe), check, own=True, same_bits=False, peer="bf16"),
        Contender("bf16", lambda: make(None)),
    ]
    contest(benchmark, case, shape, contenders, contest.device.settled_seconds)


def contenders_on(contest, shape, own_names, torchao_recipes):
    """Our variants of these names, bf16, and torchao's of these recipes."""
    device = contest.device.device
    x, grad_output = inputs(shape, device)

    def make(convert):
        model = build(shape, device)
        convert(model)
        compile_layers(model, contest.smoke)
        return training_step(model, model.layers, x, grad_output)

    check = close_to_bf16(shape, x, grad_output)
    variants = recipe_variants(LAYER_RECIPES)

    contenders = [
        Contender(
            name,
            lambda name=name: make(lambda model: tritonfp8.convert(model, variants[name])),
            check,
            own=True,
            # The order of sums in attention's backward may vary.
            same_bits=False,
            peer="bf16",
        )
        for name in own_names
    ]
    contenders.append(Contender("bf16", lambda: make(lambda model: None)))
    contenders += [
        Contender(
            f"torchao {recipe}",
            lambda recipe=recipe: make(lambda model: torchao_layers(model, recipe)),
            check,
            peer="bf16",
        )
        for recipe in torchao_recipes
    ]
    return contenders


@measures("model", (MODEL,))
def test_model(benchmark, contest, case, shape):
    contenders = contenders_on(contest, shape, MODEL_VARIANTS, TORCHAO_RECIPES)
    contest(benchmark, case, shape, contenders, contest.device.settled_seconds)


# Last, because the profiler slows later launches.
@measures("model", (MODEL_KERNELS,))
def test_kernels(contest, case, shape):
    contest.break_down(case, shape, contenders_on(contest, shape, PRECISE_VARIANTS, ()))
