"""Tensors that a compiled layer saves for backward: none that its graph has there anyway or recomputes cheaply."""

import collections

import covering
import pytest
import torch
from cases import cpu_and_cuda, normal, recorded_casts, with_gradients
from torch import nn

import tritonfp8
from tritonfp8 import convert, recipes
from tritonfp8.specs.testing import assert_bitwise_equal

pytestmark = pytest.mark.one_in(3)

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
        results[kind] = with_gradients(out, [model.get_submodule(name).weight for name in model.names])
    assert_bitwise_equal(results["compiled"], results["eager"])
    # What the backward of the product reads, and grad_weight's operand.
    assert saved["eager"] == {torch.bfloat16: 2, torch.float8_e4m3fn: 1}
    assert saved["compiled"] == {torch.bfloat16: 2, **({torch.float8_e4m3fn: 1} if is_saved else {})}


class Activated(nn.Module):
    """An MLP: ``down`` reads what ``activation`` makes of ``up``'s result, which is ``made`` times as wide."""

    def __init__(self, activation, made=1):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 128 * made), nn.Linear(128, 48)
        self.activation = activation

    def forward(self, x):
        return self.down(self.activation(self.up(x)))


def gelu_of_gpt_2(x):
    return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0))))


def halves(x):
    left, right = x.chunk(2, dim=-1)
    return nn.functional.silu(left) * right


# Tensors that forward saves: up's result, or one of its halves.
ACTIVATIONS = {
    "relu": (torch.relu, 1, {torch.bfloat16: 1}),
    "gelu": (nn.functional.gelu, 1, {torch.bfloat16: 1}),
    "gelu of gpt-2": (gelu_of_gpt_2, 1, {torch.bfloat16: 1}),
    "two halves": (halves, 2, {torch.bfloat16: 1, torch.float8_e4m3fn: 1}),
}


@cpu_and_cuda
@pytest.mark.parametrize("name", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_a_wide_input_is_cast_again_if_one_tensor_makes_it(device, name, kind):
    activation, made, expected = ACTIVATIONS[kind]
    model = Activated(activation, made).to(device, torch.bfloat16)
    convert(model, name)
    x = normal(64, 32, dtype=torch.bfloat16, device=device).requires_grad_()
    results = []
    for function in (model, torch.compile(model, backend="aot_eager_decomp_partition", fullgraph=True)):
        out, saved = saved_between(function, x, 128)
        results.append(with_gradients(out, model.parameters()))
    assert saved == expected
    if kind == "relu":
        # Decompositions of the others round otherwise than eager ops.
        assert_bitwise_equal(*results)


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
    # The input in both orientations, and the weight, perhaps rounded to MXFP4 first; backward casts its transpose.
    assert len(casts) == (2 if recipes.get(name).weights is None else 3)
