"""Tensors that a compiled layer saves for backward: none that its graph has there anyway or recomputes cheaply."""

import collections

import covering
import pytest
import torch
from cases import cpu_and_cuda, normal, recorded_casts
from torch import nn

import tritonfp8
from tritonfp8 import convert, recipes
from tritonfp8.testing import assert_bitwise_equal

pytestmark = pytest.mark.in_turn(3)

QUANTIZED = [name for name in recipes.names() if recipes.get(name).grad_weight.rhs is not None]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Between(nn.Module):
    """What layers read that is made of two other layers' results: ``width`` wide, by one layer or by two."""

    def __init__(self, width, out, readers=1):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = nn.Linear(32, width, bias=False), nn.Linear(32, width, bias=False)
        self.names = [f"reader_{i}" for i in range(readers)]
        for name in self.names:
            self.add_module(name, nn.Linear(width, out, bias=False))

    def forward(self, x):
        # Rounded once: compiled code and eager agree to the bit.
        between = self.gate(x) * self.up(x)
        return torch.cat([self.get_submodule(name)(between) for name in self.names])


def saved_between(function, x, width):
    """Result, and how many tensors of each dtype, of the size of what is read, are saved for its backward."""
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t), lambda t: t):
        out = function(x)
    return out, collections.Counter(t.dtype for t in saved.values() if t.numel() == len(x) * width)


# The first partitions as Inductor does, without its own passes over the graph, and without a compiler of C++.
PARTITIONERS = [*(("aot_eager_decomp_partition", name) for name in QUANTIZED), ("inductor", "rowwise")]
SIZES = [((128, 160), False), ((128, 48), True), ((128, 48, 2), False)]
each_size = pytest.mark.parametrize(("sizes", "is_saved"), SIZES)
# Sizes decide which tensors backward keeps, and a recipe decides the casts. So all sizes run with one recipe, and each
# recipe with one size.
ALL_SIZES = [(PARTITIONERS[QUANTIZED.index("rowwise")], size) for size in SIZES]
CASES = [(*partitioner, *size) for partitioner, size in dict.fromkeys(ALL_SIZES + covering.each(PARTITIONERS, SIZES))]


@cpu_and_cuda
@pytest.mark.parametrize(("backend", "name", "sizes", "is_saved"), CASES)
def test_an_input_that_backward_has_or_recomputes_is_not_saved_in_8_bits(device, backend, name, sizes, is_saved):
    model = Between(*sizes).to(device, torch.bfloat16)
    convert(model, name)
    check_saved(model, sizes[0], device, backend, is_saved)


# Dynamo follows the code of cached weights, and takes the rest as ops. That code depends on whether a recipe reads one
# cast of the weight in both orientations (blockwise) or two.
@cpu_and_cuda
@each_size
@pytest.mark.parametrize("name", ["rowwise", "blockwise"])
def test_nor_is_it_with_cached_weights(device, name, sizes, is_saved):
    model = Between(*sizes).to(device, torch.bfloat16)
    convert(model, name)
    with tritonfp8.quantize_weights_once(model):
        check_saved(model, sizes[0], device, "aot_eager_decomp_partition", is_saved)


def check_saved(model, width, device, backend, is_saved):
    x = normal(64, 32, dtype=torch.bfloat16, device=device).requires_grad_()
    results, saved = {}, {}
    for kind, function in (("eager", model), ("compiled", torch.compile(model, backend=backend, fullgraph=True))):
        out, saved[kind] = saved_between(function, x, width)
        weights = [model.get_submodule(name).weight for name in model.names]
        results[kind] = (out, *torch.autograd.grad(out, weights, torch.ones_like(out)))
    for actual, expected in zip(results["compiled"], results["eager"], strict=True):
        assert_bitwise_equal(actual, expected)
    # What the backward of the product reads, and grad_weight's operand.
    assert saved["eager"] == {torch.bfloat16: 2, torch.float8_e4m3fn: 1}
    assert saved["compiled"] == {torch.bfloat16: 2, **({torch.float8_e4m3fn: 1} if is_saved else {})}


LEAVES = [("aot_eager_decomp_partition", "rowwise", False), *((*each, True) for each in PARTITIONERS)]


@cpu_and_cuda
@pytest.mark.parametrize(("backend", "name", "is_leaf"), LEAVES)
def test_an_input_of_a_graph_is_saved_in_8_bits_and_cast_once(device, backend, name, is_leaf):
    layer = nn.Linear(128, 160, bias=False).to(device, torch.bfloat16)
    convert(layer, name)
    x = normal(64, 128, dtype=torch.bfloat16, device=device).requires_grad_()
    with recorded_casts(device) as casts:
        _, saved = saved_between(torch.compile(layer, backend=backend, fullgraph=True), x if is_leaf else x + 1, 128)
    assert saved == {torch.float8_e4m3fn: 1}
    # The input in both orientations, and the weight.
    assert len(casts) == 2
