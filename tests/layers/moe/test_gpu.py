"""Experts on a GPU: their results, no wait of the host, CUDA graphs, and what belongs to nobody."""

import covering
import mixtures
import pytest
import torch
from cases import normal
from routings import ROUTINGS, ends

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.functional import grouped_linear
from tritonfp8.testing import assert_bitwise_equal, sqnr

pytestmark = pytest.mark.gpu

RECIPES = recipes.names()
each_recipe = pytest.mark.parametrize("recipe", RECIPES)
EXPERTS, HIDDEN, INSIDE, TOKENS, TOP_K = 6, 256, 192, 300, 2
# Of GEMMs with results in bf16, whose operands are the same to the bit.
LEAST_DECIBELS = 45
# Inductor does not round between the operations of SwiGLU.
LEAST_DECIBELS_COMPILED = 30


def operands(tokens, groups, n, k, dtype=torch.bfloat16):
    shapes = ((tokens, k), (groups, n, k), (groups, n))
    return [normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def run_linear(recipe, x, weight, bias, offsets, grad):
    x, weight, bias = (t.detach().clone().requires_grad_() for t in (x, weight, bias))
    out = grouped_linear(x, weight, offsets, bias, recipe)
    out.backward(grad)
    return out.detach(), x.grad, weight.grad, bias.grad


@pytest.mark.parametrize(
    ("recipe", "sizes", "shape"),
    covering.pairs(RECIPES, list(ROUTINGS.values()), [(192, 256), (72, 40), (41, 75)]),
    ids=str,
)
def test_a_gpu_computes_what_the_reference_does(recipe, sizes, shape):
    x, weight, bias = operands(sum(sizes) + 5, len(sizes), *shape)
    offsets, grad = ends(sizes), normal(len(x), shape[0], seed=9, dtype=torch.bfloat16)
    expected = run_linear(recipe, x, weight, bias, offsets, grad)
    found = run_linear(recipe, *(t.cuda() for t in (x, weight, bias, offsets, grad)))
    for actual, wanted in zip(found, expected, strict=True):
        assert sqnr(actual.cpu(), wanted) >= LEAST_DECIBELS
    assert not found[0][sum(sizes) :].any()
    assert not found[1][sum(sizes) :].any()


class Layer(torch.nn.Module):
    """Experts with a router."""

    def __init__(self, recipe, bias=False):
        super().__init__()
        torch.manual_seed(0)
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.router = torch.nn.Linear(HIDDEN, EXPERTS, **options)
        self.experts = tritonfp8.Float8Experts(EXPERTS, HIDDEN, INSIDE, recipe=recipe, bias=bias, **options)

    def forward(self, x, shift=0):
        weights, index = self.router(x).float().softmax(1).topk(TOP_K)
        return self.experts(x, (index + shift) % EXPERTS, weights.to(x.dtype))


def tokens(seed=0):
    return normal(TOKENS, HIDDEN, seed=seed, dtype=torch.bfloat16, device="cuda")


def step(layer, x, shift=0):
    """The output, and the gradients of the input and of all parameters."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = layer(x, shift)
    out.backward(torch.ones_like(out))
    return [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


@each_recipe
def test_the_host_does_not_wait(recipe):
    layer, x = Layer(recipe), tokens()
    expected = step(layer, x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = step(layer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_bitwise_equal(found, expected)


@each_recipe
def test_every_run_has_the_same_bits(recipe):
    layer, x = Layer(recipe, bias=True), tokens()
    expected = step(layer, x)
    for _ in range(100):
        assert_bitwise_equal(step(layer, x), expected)


@each_recipe
def test_one_graph_serves_every_routing(recipe):
    layer = Layer(recipe)
    x, shift = tokens(), torch.zeros((), dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(layer, x, shift)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(layer, x, shift)
    for number in (1, 4):
        x.copy_(tokens(number))
        shift.fill_(number)
        graph.replay()
        found = [t.clone() for t in captured]
        assert_bitwise_equal(found, step(layer, x, shift))


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_a_compiled_layer_compiles_once(recipe):
    layer = Layer(recipe)
    compiled = torch.compile(layer, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for number in range(3):
            shift = torch.tensor(number, device="cuda")
            found, expected = step(compiled, tokens(number), shift), step(layer, tokens(number), shift)
            for actual, wanted in zip(found, expected, strict=True):
                assert sqnr(actual, wanted) >= LEAST_DECIBELS_COMPILED


@each_recipe
def test_what_belongs_to_nobody_is_not_read(recipe):
    """Weights of experts without tokens, rows after the last expert, and memory that was used before."""
    x, weight, bias = (t.cuda() for t in operands(260, 4, 192, 256))
    offsets, grad = ends((0, 120, 0, 100)).cuda(), normal(260, 192, seed=9, dtype=torch.bfloat16).cuda()
    expected = run_linear(recipe, x, weight, bias, offsets, grad)
    for tensor, rows in ((x, slice(220, None)), (grad, slice(220, None)), (weight, [0, 2]), (bias, [0, 2])):
        tensor[rows] = torch.nan
    dirty = torch.full((2**24,), torch.nan, device="cuda")
    del dirty
    assert_bitwise_equal(run_linear(recipe, x, weight, bias, offsets, grad), expected)


@each_recipe
def test_wrong_offsets_are_clamped(recipe):
    x, weight, bias = operands(100, 3, 72, 96)
    grad = normal(100, 72, seed=9, dtype=torch.bfloat16)
    hostile = torch.tensor([-5, 700, 3], dtype=torch.int32)
    found = run_linear(recipe, *(t.cuda() for t in (x, weight, bias, hostile, grad)))
    expected = run_linear(recipe, x, weight, bias, ends((0, 100, 0)), grad)
    for actual, wanted in zip(found, expected, strict=True):
        assert sqnr(actual.cpu(), wanted) >= LEAST_DECIBELS


def test_fewer_bytes_are_kept_than_in_high_precision():
    kept = {}
    for recipe in ("bf16", "rowwise"):
        # So many that the alignment of groups takes little.
        layer, x = Layer(recipe), tokens().repeat(20, 1).requires_grad_()
        layer(x).sum().backward()
        before = torch.cuda.memory_allocated()
        out = layer(x)
        kept[recipe] = torch.cuda.memory_allocated() - before
        del out
    assert kept["rowwise"] < kept["bf16"]


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_model_of_transformers_trains(family, recipe):
    losses = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = mixtures.model_of(family, torch.bfloat16)
        tritonfp8.convert(model, recipe, experts=True)
        losses[device] = trained(model.to(device))
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=0.02)


def trained(model):
    """The losses of five steps, after which every parameter of the experts has moved."""
    device = next(model.parameters()).device
    batch = torch.randint(0, model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if "experts" in name}
    losses = []
    for _ in range(5):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    stuck = [name for name, p in model.named_parameters() if name in before and torch.equal(p, before[name])]
    assert not stuck
    return losses
