"""The control of ``bench.distributed``: a model whose sums are added up in another order, and nothing else is."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from bench_distributed_cases import CONFIG, FFN
from cases import QUANTIZED

from bench.distributed import models
from tritonfp8 import recipes, reference
from tritonfp8.training.models import build_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """With biases, and magnitudes that differ along the hidden dim of the MLPs: scales depend on who shares them."""
    config = tmp_path_factory.mktemp("llama") / "config.json"
    config.write_text(json.dumps({**CONFIG, "mlp_bias": True}))
    model = build_model(str(config), 16, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in model.model.layers:
            for linear in (layer.mlp.gate_proj, layer.mlp.up_proj):
                sizes = torch.randn(FFN, generator=generator).mul(2).exp()
                linear.weight.mul_(sizes[:, None])
                linear.bias.copy_(torch.randn(FFN, generator=generator))
            layer.mlp.down_proj.weight.mul_(torch.randn(FFN, generator=generator).mul(2).exp())
    return model


def reordered(model, recipe):
    """A copy of the model as the contestant trains it."""
    contestants = {c.name: c for c in models.tp_contestants(QUANTIZED, alone=True)}
    model = copy.deepcopy(model)
    contestants[f"{recipe}, {models.REORDERED}"].convert(model)
    return model


def mlp_parameters(model):
    return {name: p.detach() for name, p in model.named_parameters() if ".mlp." in name}


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(16)[None] * 7).logits


def noise(model, exact):
    return ((logits(model) - exact).norm() / exact.norm()).item()


def test_sums_in_another_order_leave_the_function(llama):
    exact, other = logits(llama), reordered(llama, "bf16")
    assert noise(other, exact) < 1e-5
    before = dict(llama.named_parameters())
    changed = {name for name, p in other.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in mlp_parameters(llama) if not name.endswith("down_proj.bias")}
    # Each has to go along with the others.
    for name in changed:
        partly = copy.deepcopy(other)
        partly.get_parameter(name).data.copy_(before[name])
        assert noise(partly, exact) > 1e-2


def test_orders_differ_by_layer_and_not_by_rank(llama):
    first = mlp_parameters(reordered(llama, "bf16"))
    torch.manual_seed(5)
    second = mlp_parameters(reordered(llama, "bf16"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    numbered = copy.deepcopy(llama)
    for layer in numbered.model.layers:
        layer.mlp.gate_proj.bias.data.copy_(torch.arange(FFN))
    assert not torch.equal(*(layer.mlp.gate_proj.bias for layer in reordered(numbered, "bf16").model.layers))


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_sums_in_another_order_leave_what_is_quantized(llama, recipe):
    found = recipes.get(recipe)
    assert reordered(llama, recipe).model.layers[0].mlp.down_proj.recipe == found
    for transposed, spec in ((False, found.output.rhs), (True, found.grad_input.rhs)):

        def quantized(model, transposed=transposed, spec=spec):
            model = copy.deepcopy(model)
            for parameter in mlp_parameters(model).values():
                if parameter.ndim == 2:
                    codes = reference.quantize(parameter, *spec.args, transpose=transposed)
                    values = reference.dequantize(*codes, *spec.args, torch.float32)
                    parameter.copy_(values.T if transposed else values)
            return model

        first = mlp_parameters(reordered(quantized(llama), recipe))
        second = mlp_parameters(quantized(reordered(llama, recipe)))
        for name, parameter in mlp_parameters(llama).items():
            assert torch.equal(first[name], second[name]), name
            assert name.endswith("down_proj.bias") or not torch.equal(first[name], parameter)


@pytest.mark.parametrize("size", [96, 700])
def test_blocks_move_as_they_are_shuffled_inside_and_one_that_is_not_whole_stays_last(size):
    mlp = SimpleNamespace(
        gate_proj=torch.nn.Linear(4, size), up_proj=torch.nn.Linear(4, size), down_proj=torch.nn.Linear(size, 4)
    )
    torch.nn.init.zeros_(mlp.gate_proj.bias).data.add_(torch.arange(size))
    models.reorder_sums(SimpleNamespace(model=SimpleNamespace(layers=[SimpleNamespace(mlp=mlp)])), 128)
    blocks = [block.tolist() for block in mlp.gate_proj.bias.int().split(128)]
    firsts = [min(block) for block in blocks]
    assert sorted(firsts) == list(range(0, size, 128))
    assert firsts[-1] == size // 128 * 128
    assert len(firsts) == 1 or firsts != sorted(firsts)
    for first, block in zip(firsts, blocks, strict=True):
        assert sorted(block) == list(range(first, first + len(block))) != block
