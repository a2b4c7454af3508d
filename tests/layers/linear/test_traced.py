"""Graphs traced outside of torch.compile train to the bits of the eager layer, or are an error."""

import functools
import itertools

import pytest
import torch
from cases import normal, with_gradients
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.fx.experimental.proxy_tensor import make_fx

import tritonfp8
from tritonfp8 import Float8Linear, convert, ops, recipes
from tritonfp8.functional import grouped_linear, linear, quantize_weight
from tritonfp8.specs.testing import assert_bitwise_equal

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]


class Residual(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.first, self.second = (nn.Linear(70, 70, bias=bias) for _ in range(2))
        self.last = nn.Linear(70, 20, bias=bias)

    def forward(self, x):
        x = x + torch.tanh(self.first(x))
        x = x + torch.tanh(self.second(x))
        return self.last(x)


def residual(name, bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    model = Residual(bias).to(dtype)
    convert(model, name)
    return model


def exported(model, x, strict=False):
    return torch.export.export(model, (x,), strict=strict).module()


def split(model, x):
    spec = {"second": SplitPoint.BEGINNING, "last": SplitPoint.BEGINNING}
    pipe = pipeline(model, (x,), split_spec=spec)
    # A Pipe itself detaches what passes between its stages.
    return nn.Sequential(*(pipe.get_stage_module(i) for i in range(pipe.num_stages)))


TRACERS = {
    "export": exported,
    "strict": lambda model, x: exported(model, x, strict=True),
    "decomposed": lambda model, x: torch.export.export(model, (x,)).run_decompositions().module(),
    "draft_export": lambda model, x: torch.export.draft_export(model, (x,)).module(),
    "make_fx": lambda model, x: make_fx(lambda x: model(x))(x),
    "make_fx_fake": lambda model, x: make_fx(lambda x: model(x), tracing_mode="fake", _allow_non_fake_inputs=True)(x),
    "pre_dispatch": lambda model, x: make_fx(lambda x: model(x), pre_dispatch=True)(x),
    "jit": lambda model, x: torch.jit.trace(model, (x,)),
    "pipeline": split,
}
OF_THE_MODEL = {"make_fx", "make_fx_fake", "pre_dispatch", "jit"}


def gradients(run, x, grad, module):
    """Output and gradients; parameters are sorted by name."""
    x = x.detach().requires_grad_()
    module.zero_grad()
    out = run(x)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(grad)
    named = {name: p.grad for name, p in module.named_parameters()}
    assert all(g is not None for g in named.values()), [n for n, g in named.items() if g is None]
    # The submodule of a stage comes before the parameter's own name.
    return [out.detach(), x.grad, *(named[name] for name in sorted(named, key=lambda n: n.split(".")[-2:]))]


def check(name, tracer, **kwargs):
    model, x = residual(name, **kwargs), normal(2, 33, 70, dtype=kwargs.get("dtype", torch.float32))
    grad = normal(2, 33, 20, seed=1, dtype=x.dtype)
    expected = gradients(model, x, grad, model)
    traced = TRACERS[tracer](model, x)
    # make_fx and jit.trace call the parameters of the model itself.
    actual = gradients(traced, x, grad, model if tracer in OF_THE_MODEL else traced)
    assert len(actual) == len(expected)
    assert_bitwise_equal(actual, expected)


PAIRS = [
    *zip(itertools.cycle(recipes.names()), TRACERS, strict=False),
    *itertools.product(recipes.names(), ("make_fx", "jit")),
]


@pytest.mark.parametrize(("name", "tracer"), dict.fromkeys(PAIRS))
def test_every_gradient_of_a_traced_model_is_that_of_eager(name, tracer):
    check(name, tracer)


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_trains_as_exported(name):
    check(name, "export", bias=False, dtype=torch.bfloat16)


@pytest.mark.parametrize("tracer", ["draft_export", "make_fx", "strict"])
def test_layers_without_bias_are_traced(tracer):
    check("rowwise", tracer, bias=False)


def joint(layer, x, weight, grad):
    return with_gradients(torch.func.functional_call(layer, {"weight": weight}, (x,)), (x, weight), grad)


@pytest.mark.parametrize("name", ["rowwise", "blockwise", "rowwise_hp_grad_weight"])
def test_a_graph_of_forward_and_backward_is_eager_to_the_bit(name):
    layer = Float8Linear(70, 20, bias=False, recipe=name)
    x, grad = normal(33, 70).requires_grad_(), normal(33, 20, seed=1)
    graph = make_fx(lambda *args: joint(layer, *args))(x, layer.weight, grad)
    other = normal(33, 70, seed=2).requires_grad_()
    targets = [node.target for node in graph.graph.nodes]
    assert ops.whole_linear in targets
    assert ops.whole_linear_backward in targets
    assert_bitwise_equal(graph(other, layer.weight, grad), joint(layer, other, layer.weight, grad))


def test_autocast_at_the_trace_travels_and_that_of_the_replay_does_not_matter():
    model, x, grad = residual("rowwise"), normal(33, 70), normal(33, 20, seed=1, dtype=torch.bfloat16)
    bf16 = torch.autocast("cpu", torch.bfloat16)
    with bf16:
        expected = gradients(model, x, grad, model)
        graph = make_fx(lambda x: model(x))(x)
    plain = make_fx(lambda x: model(x))(x)
    assert_bitwise_equal(gradients(graph, x, grad, model), expected)
    expected = gradients(model, x, grad.float(), model)
    with bf16:
        assert_bitwise_equal(gradients(plain, x, grad.float(), model), expected)


@pytest.mark.parametrize("name", ["rowwise", "blockwise", "rowwise_hp_grad_weight", "mxfp8"])
def test_a_trace_keeps_weights_that_are_quantized_ahead(name):
    weight, x, grad = normal(20, 70, seed=1).requires_grad_(), normal(33, 70), normal(33, 20, seed=2)
    held = quantize_weight(2 * weight, recipes.get(name))

    def run(x, weight):
        return linear(x, weight, None, name, quantized_weight=held)

    functions = run, make_fx(run)(x.requires_grad_(), weight)
    assert_bitwise_equal(*(with_gradients(function(x, weight), (x, weight), grad) for function in functions))


def inside_a_block(model, x):
    with tritonfp8.quantize_weights_once(model):
        return make_fx(lambda x: model(x))(x.requires_grad_()), model


def of_any_length(model, x):
    dynamic = ({0: torch.export.Dim("tokens", min=2, max=500)},)
    graph = torch.export.export(model, (x,), dynamic_shapes=dynamic).module()
    return graph, graph


def compiled(model, x):
    graph = exported(model, x)
    return torch.compile(graph, backend="aot_eager", fullgraph=True), graph


@pytest.mark.parametrize(("how", "tokens"), [(inside_a_block, 33), (of_any_length, 150), (compiled, 33)])
def test_a_graph_trains(how, tokens):
    model = residual("blockwise")
    graph, owner = how(model, normal(33, 70))
    x, grad = normal(tokens, 70, seed=3), normal(tokens, 20, seed=1)
    assert_bitwise_equal(gradients(graph, x, grad, owner), gradients(model, x, grad, model))


def test_frozen_weights_have_no_gradient_and_inputs_may():
    model, x, grad = residual("rowwise"), normal(33, 70), normal(33, 20, seed=1)
    model.first.requires_grad_(False)
    graph = exported(model, x)
    x.requires_grad_()
    found = []
    for run in (model, graph):
        found.append(with_gradients(run(x), [x, *(p for p in run.parameters() if p.requires_grad)], grad))
    assert len(found[0]) == 6
    assert_bitwise_equal(*found)


def test_errors_of_a_trace():
    model, x = residual("rowwise"), normal(33, 70).requires_grad_()
    graph = exported(model, x.detach())
    (grad,) = torch.autograd.grad(graph(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative"):
        grad.sum().backward()
    with pytest.raises(ValueError, match=r"linear needs input \[..., K\] and weight \[N, K\]"):
        make_fx(lambda x: model.first(x))(normal(33, 40))


class Grouped(nn.Module):
    """Matrices of two experts, the first of which multiplies 20 rows."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(normal(2, 32, 64, seed=1))
        self.register_buffer("offsets", torch.tensor([20, 33], dtype=torch.int32))

    def forward(self, x):
        return grouped_linear(x, self.weight, self.offsets, recipe="rowwise")


def test_what_has_no_op_with_gradients_is_an_error_and_runs_otherwise():
    model, x = Grouped(), normal(33, 64)
    for graph in (exported(model, x), TRACERS["make_fx"](model, x)):
        out = graph(x)
        assert_bitwise_equal(out.detach(), model(x).detach())
        with pytest.raises(RuntimeError, match="traced without the backward of a layer of tritonfp8"):
            out.sum().backward()


def test_experts_traced_with_their_backward_are_eager_to_the_bit():
    model, x = Grouped(), normal(33, 64).requires_grad_()

    def step(run, x, *parameters):
        return torch.autograd.grad(run(x).square().sum(), (x, *parameters))

    args = x, *model.parameters()
    expected = step(model, *args)
    assert_bitwise_equal(make_fx(functools.partial(step, model))(*args)(*args), expected)


def test_the_ops_are_as_torch_wants_ops():
    x, weight = normal(33, 70).requires_grad_(), normal(20, 70, seed=1).requires_grad_()
    bias, recipe = normal(20, seed=2).requires_grad_(), recipes.get("rowwise")
    torch.library.opcheck(ops.whole_linear, (x, weight, *recipe.args, bias))
    held = [t for q in quantize_weight(weight, recipe) if q is not None for t in (q.qdata, q.scale)]
    # test_schema compares inputs before and after by allclose, which has no 8-bit floats.
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(ops.whole_linear, (x, weight, *recipe.args, None, *held), test_utils=checks)
    args = normal(33, 20, seed=3), x.detach(), weight.detach(), *recipe.args, True, False, True
    torch.library.opcheck(ops.whole_linear_backward, args)


@pytest.mark.parametrize("name", recipes.names())
@pytest.mark.parametrize(
    ("tracer", "error", "message"),
    [
        (torch.jit.script, TypeError, "torch.jit.script needs layers of plain torch; got a Float8Linear"),
        (torch.fx.symbolic_trace, TypeError, "input must be a torch.Tensor; got Proxy"),
    ],
    ids=["jit.script", "symbolic_trace"],
)
def test_other_tracers_are_errors(name, tracer, error, message):
    with pytest.raises(error, match=message):
        tracer(residual(name))
