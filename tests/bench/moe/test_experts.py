"""The gate of a mixture of experts: every recipe passes with room, and each wrong weight shows."""

import pytest
import torch

import tritonfp8
from bench.contest import gates
from bench.contest.grouped import RECIPES
from bench.models import TorchExperts, mixture, training_step
from bench.shapes import SMOKE, Shape, select
from bench.suites.test_experts import close_experts, flops, inputs

CPU = torch.device("cpu")
SHAPE = Shape("set", "mixture", (96, 2, 4, 128, 96))


@pytest.fixture(scope="module")
def batch():
    torch.manual_seed(0)
    return inputs(SHAPE, CPU)


@pytest.mark.parametrize("recipe", [*RECIPES, "bf16"])
def test_every_recipe_passes_with_room(batch, monkeypatch, recipe):
    monkeypatch.setattr(gates, "MODEL_SQNR", gates.MODEL_SQNR + 3)
    layer = mixture(SHAPE, CPU, tritonfp8.Float8Experts, recipe)
    close_experts(SHAPE, *batch)(training_step(layer, layer, *batch)())


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_the_weight_of_another_expert_shows_with_room(batch, monkeypatch, name):
    monkeypatch.setattr(gates, "MODEL_SQNR", gates.MODEL_SQNR - 10)
    layer = mixture(SHAPE, CPU, TorchExperts)
    check, step = close_experts(SHAPE, *batch), training_step(layer, layer, *batch)
    check(step())
    with torch.no_grad():
        weight = layer.experts.get_parameter(name)
        weight[1] = weight[2]
    with pytest.raises(AssertionError, match="against bf16"):
        check(step())


def test_flops_of_a_layer():
    # Of each row: gate, up and down, each forward, for grad_input and for grad_weight.
    tokens, top_k, _, hidden, intermediate = SHAPE.size
    assert flops(SHAPE) == 2 * tokens * top_k * 9 * hidden * intermediate
    assert {shape.set for shape in select("experts")} == {"deepseek-v3", "qwen3-30b", "mixtral"}
    assert select("experts", [SMOKE])
