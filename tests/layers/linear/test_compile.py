"""torch.compile: one graph, the same bytes as eager, and no compilation that a user would not expect."""

import pytest
import torch
from cases import (
    CODES,
    SPECS,
    banded,
    cpu_and_cuda,
    llama,
    named,
    normal,
    recorded_casts,
    tokens,
    with_gradients,
    with_head,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import tritonfp8
from tritonfp8 import Float8Linear, convert, recipes, swap_recipe
from tritonfp8.compat.counting import count_gemms
from tritonfp8.functional import linear
from tritonfp8.recipes import Recipe
from tritonfp8.specs.testing import assert_bitwise_equal, sqnr

pytestmark = pytest.mark.one_in(4)

BACKENDS = ["aot_eager", "inductor"]
each_recipe = pytest.mark.parametrize("name", recipes.names())
each_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(function, backend):
    """The function compiled as one graph, and the counter of the graphs that it took."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True), counter


def converted_llama(name, device="cpu", dtype=torch.bfloat16, layers=1):
    model = llama(num_hidden_layers=layers).to(device, dtype)
    convert(model, with_head(name))
    return model


def loss_function(model):
    return lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss


def step(model, loss, ids):
    """Loss and gradients, and the products that ran."""
    model.zero_grad()
    with count_gemms() as counts:
        value = loss(ids)
        value.backward()
    return value.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}, counts.calls


def check_llama(model, backend, device):
    """The compiled loss and its graphs, after two steps that equal the step of eager code."""
    ids = tokens(device=device)
    eager = step(model, loss_function(model), ids)
    loss, graphs = compiled(loss_function(model), backend)
    for _ in range(2):
        value, grads, calls = step(model, loss, ids)
        assert calls == eager[2]
        assert abs(value - eager[0]) < 2e-3
        # Sums in another order move a few elements to the neighbouring code.
        assert all(sqnr(grads[p], eager[1][p]) > 20 for p in grads)
    assert graphs.frame_count == 1
    assert not counters["graph_break"]
    return loss, graphs


# Two layers are compiled on a GPU: on a CPU, g++ compiles the second one's kernels as long as the first one's.
THROUGH_INDUCTOR = [
    pytest.param("rowwise", "cpu", 1, marks=pytest.mark.slow),
    *(pytest.param(name, "cuda", 2, marks=pytest.mark.gpu) for name in recipes.names()),
]


@pytest.mark.parametrize(("name", "device", "layers"), THROUGH_INDUCTOR)
def test_llama_through_inductor(name, device, layers):
    # In float32, where fused elementwise ops round as they do one by one, to within a few ulps.
    check_llama(converted_llama(name, device, torch.float32, layers), "inductor", device)


@pytest.mark.gpu
@each_recipe
def test_cuda_graphs_of_compiled_layers_replay_the_same_bits(name):
    """``mode="reduce-overhead"``: steps with new inputs and with weights that the optimizer changed in place."""
    inputs = [normal(96, 256, seed=i).to("cuda", torch.bfloat16) for i in range(5)]
    grads = [normal(96, 128, seed=10 + i).to("cuda", torch.bfloat16) for i in range(5)]

    def training(mode):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(256, 512), nn.Linear(512, 128)).to("cuda", torch.bfloat16)
        convert(layers, name)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        run, found = torch.compile(layers, mode=mode, fullgraph=True), []
        for x, grad in zip(inputs, grads, strict=True):
            torch.compiler.cudagraph_mark_step_begin()
            with count_gemms() as counts:
                out = run(x)
                out.backward(grad)
            found.append([out.detach().clone(), *(p.grad.clone() for p in layers.parameters())])
            optimizer.step()
            optimizer.zero_grad()
        return found, counts.calls

    (expected, called), (found, replayed) = training(None), training("reduce-overhead")
    # Graphs run without the ops, which count.
    assert called
    assert not replayed
    assert_bitwise_equal(found, expected)


def contents(results):
    """The distinct ``(qdata, scale)``, by shape and bytes: compiled code quantizes an input of three layers once."""

    def content(x):
        x = x.clone(memory_format=torch.contiguous_format)
        return x.shape, x.view(torch.uint8).numpy().tobytes()

    # An amax, the third of three results, is no cast.
    pairs = (result[start : start + 2] for result in results for start in range(0, len(result) - 1, 2))
    return {tuple(map(content, pair)) for pair in pairs}


# Recipes that quantize a weight or an input once, twice, or not for a GEMM. A layer of each recipe is compiled below.
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("name", ["bf16", "rowwise", "rowwise_hp_grad_weight", "blockwise"])
def test_llama_is_one_graph(name):
    """And quantizes the bytes that eager quantizes."""
    model = converted_llama(name)
    loss, graphs = check_llama(model, "aot_eager", "cpu")
    eager_loss, ids = loss_function(model), tokens()
    with recorded_casts() as eager:
        expected = eager_loss(ids)
    with recorded_casts() as forward:
        actual = loss(ids)
    # Of wide inputs, the operands of grad_weight are cast there.
    with recorded_casts() as backward:
        actual.backward()
    assert graphs.frame_count == 1
    assert contents(forward) <= contents(eager) <= contents(forward) | contents(backward)
    assert bool(eager) == (recipes.get(name).quantized_share > 0)
    assert_bitwise_equal(actual, expected)


@cpu_and_cuda
@each_backend
@each_recipe
def test_linear_is_eager_to_the_bit(device, backend, name):
    """All arithmetic is inside the ops, forward and backward, whatever surrounds them."""
    recipe = recipes.get(name)
    function, graphs = compiled(lambda x, w: linear(x, w, None, recipe), backend)
    for shape in ((33, 70), (2, 5, 70)):
        x = normal(*shape, dtype=torch.bfloat16, device=device).requires_grad_()
        w = normal(20, 70, seed=1, dtype=torch.bfloat16, device=device).requires_grad_()
        grad = normal(*shape[:-1], 20, seed=2, dtype=torch.bfloat16, device=device)
        outs = function(x, w), linear(x, w, None, recipe)
        assert_bitwise_equal(*(with_gradients(out, (x, w), grad) for out in outs))
    assert graphs.frame_count == 2


@cpu_and_cuda
@each_backend
def test_public_functions_are_eager_to_the_bit(device, backend):
    x, y = banded(130, 70).to(device), banded(40, 70, seed=1).to(device)

    def every_spec(x, y):
        results = []
        for spec in SPECS:
            a, b = tritonfp8.quantize(x, spec), tritonfp8.quantize(y, spec)
            both = tritonfp8.quantize_both(x, spec, spec)
            results.append((a, both, tritonfp8.dequantize(a), tritonfp8.scaled_matmul(a, b, out_dtype=torch.float32)))
        return results

    function, graphs = compiled(every_spec, backend)
    assert_bitwise_equal(function(x, y), every_spec(x, y))
    assert graphs.frame_count == 1


# Two rows of so many tokens fill more than one block of 128: torch specializes on a size of 1, of a single block too.
LENGTH = 80


# Blocks of tokens are what depends on their number. A layer of each recipe, below, takes any numbers.
@pytest.mark.parametrize("name", ["blockwise"])
def test_at_most_two_graphs_over_batch_sizes(name):
    model = converted_llama(name)
    loss, graphs = compiled(loss_function(model), "aot_eager")
    for batch in range(1, 9):
        ids = tokens(batch, LENGTH)
        value, _, calls = step(model, loss, ids)
        assert abs(value - loss_function(model)(ids)) < 2e-3
        assert calls == {"reference": 24}
    assert graphs.frame_count <= 2


@pytest.mark.parametrize("name", ["rowwise", "blockwise", "mxfp8"])
def test_one_graph_with_mark_dynamic(name):
    model = nn.Sequential(nn.Linear(64, 176), nn.SiLU(), nn.Linear(176, 64)).bfloat16()
    convert(model, name)
    call, graphs = compiled(model, "aot_eager")
    for batch in range(2, 9):
        x = normal(batch, LENGTH, 64, dtype=torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 0)
        out = call(x)
        out.sum().backward()
        assert_bitwise_equal(out, model(x))
    assert graphs.frame_count == 1


# Torch specializes on a size of 1, and so on a single block of tokens.
GRAPHS = {**dict.fromkeys(recipes.names(), 1), "blockwise": 2, "mxfp8": 2}


@pytest.mark.parametrize(("name", "graphs_in_all"), GRAPHS.items())
def test_odd_numbers_of_tokens_take_no_graph_of_their_own(name, graphs_in_all):
    layer = Float8Linear(70, 20, recipe=name)
    call, graphs = compiled(layer, "aot_eager")
    for rows in (400, 129, 1001, 256, 127, 2, 3):
        x = normal(rows, 70).requires_grad_()
        torch._dynamo.mark_dynamic(x, 0)
        wanted, grad = (x, *layer.parameters()), normal(rows, 20, seed=1)
        assert_bitwise_equal(*(with_gradients(function(x), wanted, grad) for function in (call, layer)))
    assert graphs.frame_count == graphs_in_all


def test_swapping_to_an_equal_recipe_compiles_nothing():
    model = nn.Sequential(nn.Linear(70, 40), nn.ReLU(), nn.Linear(40, 20))
    convert(model, "rowwise")
    call, graphs = compiled(model, "aot_eager")
    x = normal(33, 70)
    first = call(x)
    for equal in ("rowwise", recipes.get("rowwise"), Recipe.from_toml(recipes.get("rowwise").to_toml())):
        swap_recipe(model, equal)
        assert_bitwise_equal(call(x), first)
    assert graphs.frame_count == 1
    swap_recipe(model, "mxfp8")
    assert_bitwise_equal(call(x), model(x))
    assert graphs.frame_count == 2
    # What was compiled for the first recipe is still there.
    swap_recipe(model, "rowwise")
    assert_bitwise_equal(call(x), first)
    assert graphs.frame_count == 2


def test_autocast_inside_the_graph():
    layer = Float8Linear(70, 20, recipe="rowwise")
    x = normal(33, 70).requires_grad_()

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    call, graphs = compiled(run, "aot_eager")
    out = call(x)
    assert_bitwise_equal(out, run(x))
    assert out.dtype == torch.bfloat16
    assert graphs.frame_count == 1


@pytest.mark.parametrize("name", [*recipes.names(), *CODES.values()], ids=named)
def test_activation_checkpointing_inside_the_graph(name):
    model = nn.Sequential(nn.Linear(70, 40), nn.Tanh(), nn.Linear(40, 20)).bfloat16()
    convert(model, name)
    x = normal(33, 70, dtype=torch.bfloat16).requires_grad_()
    call, graphs = compiled(lambda x: checkpoint(model, x, use_reentrant=False), "aot_eager")
    with count_gemms() as counts:
        found = with_gradients(call(x), [x])
    assert_bitwise_equal(found, with_gradients(model(x), [x]))
    assert graphs.frame_count == 1
    # The output of the first layer a second time; the output of the last is not needed again.
    assert counts.calls.total() == 7


@cpu_and_cuda
@each_recipe
def test_weights_quantized_once_take_one_more_graph(device, name):
    model = nn.Sequential(nn.Linear(70, 40), nn.Tanh(), nn.Linear(40, 20)).to(device, torch.bfloat16)
    convert(model, name)
    call, graphs = compiled(model, "aot_eager")
    x = normal(33, 70, dtype=torch.bfloat16, device=device).requires_grad_()

    def gradients(function):
        return with_gradients(function(x), (x, *model.parameters()))

    expected = gradients(model)
    for _ in range(2):
        assert_bitwise_equal(gradients(call), expected)
        for _ in range(2):
            with tritonfp8.quantize_weights_once(model):
                assert_bitwise_equal(gradients(call), expected)
                assert_bitwise_equal(gradients(call), expected)
    assert graphs.frame_count == 2


def test_a_change_inside_the_block_does_not_pass_in_a_graph():
    layer = Float8Linear(70, 20, recipe="rowwise")
    call, _ = compiled(layer, "aot_eager")

    def change():
        call(normal(33, 70))
        layer.weight.detach().mul_(2)
        call(normal(33, 70))

    words = "weights changed inside quantize_weights_once"
    with pytest.raises(RuntimeError, match=words), tritonfp8.quantize_weights_once(layer):
        change()
    assert_bitwise_equal(call(normal(33, 70)), layer(normal(33, 70)))


@pytest.mark.slow
def test_layers_that_read_one_input_quantize_it_once():
    model = nn.ModuleList(nn.Linear(70, 40) for _ in range(2))
    convert(model, "rowwise")
    call, graphs = compiled(lambda x: model[0](x) * model[1](x), "inductor")
    call(normal(33, 70)).sum().backward()
    with recorded_casts() as results:
        call(normal(33, 70))
    assert graphs.frame_count == 1
    assert sum(result[0].shape == (33, 70) for result in results) == 1


def test_layers_that_are_alike_compile_once():
    model, counter = converted_llama("rowwise", layers=2), CompileCounterWithBackend("eager")
    assert len(model.model.layers) > 1
    for layer in model.model.layers:
        layer.compile(backend=counter, fullgraph=True)
    model(tokens(), use_cache=False).logits.sum().backward()
    assert counter.frame_count == 1


@pytest.mark.parametrize("autocast", [False, True])
def test_operands_that_do_not_go_together_raise_as_in_eager(autocast):
    layer = Float8Linear(70, 20, recipe="rowwise")
    call = torch.compile(layer, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with pytest.raises(ValueError, match=r"linear needs input \[..., K\] and weight \[N, K\]; got \(33, 40\)"):
            call(normal(33, 40))
        if not autocast:
            with pytest.raises(TypeError, match=r"got weight of torch.float32 with input of torch.bfloat16"):
                call(normal(33, 70, dtype=torch.bfloat16))
