"""Transforms of torch.func through converted layers: to the bits of autograd, and of a loop over the samples."""

import pytest
import torch
from cases import normal
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import tritonfp8
from tritonfp8 import convert, ops, recipes
from tritonfp8.compat import counting
from tritonfp8.specs.testing import assert_bitwise_equal

each_recipe = pytest.mark.parametrize("name", recipes.names())
SAMPLES = 3


def model_of(name, bias=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 36, bias=bias), nn.Tanh(), nn.Linear(36, 20, bias=bias))
    convert(model, name)
    return model, {key: p.detach() for key, p in model.named_parameters()}


def samples(rows=7):
    """``[SAMPLES, rows, 40]`` of such different sizes that a scale of all samples would round the small ones away."""
    return normal(SAMPLES, rows, 40) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]


def loss_of(model):
    return lambda weights, x: functional_call(model, weights, (x,)).square().sum()


def by_autograd(model, x):
    """Gradients of the parameters and of ``x``."""
    x = x.detach().requires_grad_()
    return list(torch.autograd.grad(model(x).square().sum(), (*model.parameters(), x)))


def stacked(results):
    return [torch.stack(column) for column in zip(*results, strict=True)]


def summed(model):
    """The loss of an input, for gradients of the input."""
    return lambda x: model(x).square().sum()


@each_recipe
def test_grad_is_that_of_autograd(name):
    model, weights = model_of(name)
    x = samples()[1]
    found, of_x = grad(loss_of(model), (0, 1))(weights, x)
    assert_bitwise_equal([*found.values(), of_x], by_autograd(model, x))


@each_recipe
def test_vmap_over_inputs_is_a_loop_over_them(name):
    """Every sample is quantized by itself, so a large sample does not change the scale of a small one."""
    model, _ = model_of(name)
    x = samples()
    expected = torch.stack([model(sample) for sample in x])
    assert_bitwise_equal(vmap(model)(x), expected)
    assert_bitwise_equal(vmap(model, in_dims=2, out_dims=1)(x.movedim(0, 2)), expected.movedim(0, 1))


@each_recipe
def test_gradients_of_samples_are_those_of_a_loop(name):
    model, weights = model_of(name)
    x = samples()
    found, of_x = vmap(grad(loss_of(model), (0, 1)), (None, 0))(weights, x)
    assert_bitwise_equal([*found.values(), of_x], stacked([by_autograd(model, sample) for sample in x]))


@each_recipe
def test_gradient_of_a_batched_loss_is_that_of_a_loop(name):
    """Gradients of the shared weights are summed over the samples in the order of the loop."""
    model, weights = model_of(name)
    x = samples()
    batched = grad(lambda w: vmap(loss_of(model), (None, 0))(w, x).sum())(weights)
    loss = torch.stack([model(sample).square().sum() for sample in x]).sum()
    assert_bitwise_equal(list(batched.values()), list(torch.autograd.grad(loss, tuple(model.parameters()))))


@each_recipe
def test_jacrev_is_one_backward_for_each_output(name):
    model, _ = model_of(name)
    x = samples(rows=2)[1].requires_grad_()
    out = model(x)
    rows = [torch.autograd.grad(out, x, seed, retain_graph=True)[0] for seed in torch.eye(40).view(40, 2, 20)]
    assert_bitwise_equal(jacrev(model)(x.detach()).detach().flatten(0, 1), torch.stack(rows))


@pytest.mark.parametrize("create_graph", [False, True])
def test_batched_gradients_of_an_eager_graph(create_graph):
    """They run the backward of layers that were called outside of a transform, for each seed by itself."""
    model, _ = model_of("tensorwise")
    x = samples(rows=2)[1].requires_grad_()
    out, seeds = model(x), torch.eye(40).view(40, 2, 20) * torch.logspace(-3, 3, 40)[:, None, None]
    expected = torch.stack([torch.autograd.grad(out, x, seed, retain_graph=True)[0] for seed in seeds])
    options = {"retain_graph": True, "create_graph": create_graph}
    by_vmap = vmap(lambda seed: torch.autograd.grad(out, x, seed, **options)[0])(seeds)
    (by_argument,) = torch.autograd.grad(out, x, seeds, is_grads_batched=True, **options)
    assert_bitwise_equal([by_vmap.detach(), by_argument.detach()], [expected, expected])


@each_recipe
def test_vmap_over_weights_is_a_loop_over_models(name):
    model, weights = model_of(name)
    x = samples()[1]
    many = {key: torch.stack([p * scale for scale in (0.01, 1.0, 100.0)]) for key, p in weights.items()}
    each = [{key: p[i] for key, p in many.items()} for i in range(SAMPLES)]
    expected = [list(grad(loss_of(model))(one, x).values()) for one in each]
    assert_bitwise_equal(list(vmap(grad(loss_of(model)), (0, None))(many, x).values()), stacked(expected))


def test_vmap_of_vmap_and_of_single_rows():
    """A sample may be one row without a leading dim, which is a GEMM of one row, as in the loop."""
    model, _ = model_of("tensorwise", bias=False)
    x = samples()
    expected = torch.stack([torch.stack([model(row) for row in sample]) for sample in x])
    assert_bitwise_equal(vmap(vmap(model))(x), expected)


def test_vjp_may_be_called_after_its_transform():
    model, _ = model_of("rowwise")
    x = samples()[1].requires_grad_()
    out, pull = vjp(model, x.detach())
    expected = model(x)
    assert_bitwise_equal(out.detach(), expected)
    assert_bitwise_equal(pull(out.detach())[0], torch.autograd.grad(expected, x, out.detach())[0])


def test_autograd_goes_through_vmap():
    model, _ = model_of("blockwise")
    x = samples().requires_grad_()
    wanted = (*model.parameters(), x)
    found = torch.autograd.grad(vmap(model)(x).square().sum(), wanted)
    loop = torch.stack([model(sample) for sample in x]).square().sum()
    assert_bitwise_equal(list(found), list(torch.autograd.grad(loop, wanted)))


def test_autocast_inside_a_transform():
    model, weights = model_of("rowwise")
    x = samples()[1]
    with torch.autocast("cpu", torch.bfloat16):
        found = grad(loss_of(model))(weights, x)
        assert_bitwise_equal(list(found.values()), by_autograd(model, x)[:-1])


@pytest.mark.parametrize("name", ["rowwise", "blockwise"])
def test_weights_that_are_quantized_once(name):
    model, _ = model_of(name)
    x = samples()
    expected = stacked([by_autograd(model, sample) for sample in x])[-1]
    with tritonfp8.quantize_weights_once(model):
        found = vmap(grad(summed(model)))(x)
    assert_bitwise_equal(found, expected)


def test_a_cached_weight_that_changes_or_is_parametrized_is_an_error_in_a_transform_too():
    model, _ = model_of("rowwise")
    words = "a weight was changed inside quantize_weights_once"
    with pytest.raises(RuntimeError, match=words), tritonfp8.quantize_weights_once(model):
        (model[0].weight.detach().mul_(2), grad(summed(model))(samples()[1]))
    nn.utils.parametrizations.weight_norm(model[0])
    words = "got a parametrized weight.*Leave out quantize_weights_once"
    with tritonfp8.quantize_weights_once(model), pytest.raises(RuntimeError, match=words):
        vmap(model)(samples())


def test_a_shared_weight_is_quantized_once_in_each_pass():
    """Of its 18 casts of both orientations in a loop over three samples, two layers keep six."""
    model, weights = model_of("rowwise")
    graph = make_fx(vmap(grad(loss_of(model)), (None, 0)))(weights, samples())
    casts = [n for n in graph.graph.nodes if n.target in (ops.quantize, ops.quantize_both)]
    layers = [n for n in graph.graph.nodes if n.target in (ops.whole_linear, ops.whole_linear_backward)]
    assert len(layers) == 2 * 2 * SAMPLES
    # The first layer needs no gradient of its input, so no cast in backward.
    assert len(casts) == 3
    found = graph(weights, samples())
    assert_bitwise_equal(list(found.values()), stacked([by_autograd(model, x)[:-1] for x in samples()]))


def test_gemms_are_logged_under_their_layers():
    model, weights = model_of("rowwise")
    with counting.log_gemms() as log:
        vmap(grad(loss_of(model), (0, 1)), (None, 0))(weights, samples())
    found = [(g.layer, g.gemm) for g in log.gemms]
    wanted = [(model[i], g) for i in (0, 2) for g in ("output", "grad_input", "grad_weight")]
    assert len(found) == SAMPLES * len(wanted)
    assert all(found.count(each) == SAMPLES for each in wanted)


def test_functionalize_keeps_results_and_gradients():
    model, _ = model_of("rowwise")
    x = samples()[1]
    expected = by_autograd(model, x)[:-1]
    loss = functionalize(model)(x).square().sum()
    assert_bitwise_equal(list(torch.autograd.grad(loss, tuple(model.parameters()))), expected)


@each_recipe
@pytest.mark.parametrize("transform", [jacfwd, hessian, lambda f: lambda x: jvp(f, (x,), (x,))])
def test_forward_mode_is_an_error_that_names_the_package(transform, name):
    model, _ = model_of(name)
    with pytest.raises(RuntimeError, match=r"tritonfp8 has no forward-mode derivative.*torch\.func\.grad, vjp, jacrev"):
        transform(lambda x: model(x).sum())(samples()[1])


def test_forward_mode_of_autograd_is_an_error_only_with_a_tangent():
    model, _ = model_of("bf16")
    x = samples()[1]
    with forward_ad.dual_level():
        assert_bitwise_equal(model(x), model(x.clone()))
        with pytest.raises(RuntimeError, match="tritonfp8 has no forward-mode derivative"):
            model(forward_ad.make_dual(x, x))


def test_second_derivatives_and_a_batch_without_samples_are_errors():
    model, _ = model_of("rowwise")
    inner = grad(summed(model))
    for transform in (grad(lambda x: inner(x).sum()), jacfwd(inner)):
        with pytest.raises(RuntimeError, match=r"no second derivative|no forward-mode derivative"):
            transform(samples()[1])
    with pytest.raises(ValueError, match=r"needs one sample or more; got a batch dim of size 0"):
        vmap(model)(samples()[:0])


def test_compiled():
    """vmap is one graph; grad leaves the graph to the same bits, and as one graph it is an error."""
    torch._dynamo.reset()
    (model, weights), x = model_of("rowwise"), samples()
    compiled = torch.compile(vmap(model), backend="aot_eager", fullgraph=True)
    assert_bitwise_equal(compiled(x), vmap(model)(x))
    run, x = grad(loss_of(model)), x[1]
    assert_bitwise_equal(torch.compile(run, backend="aot_eager")(weights, x), run(weights, x))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        torch.compile(run, backend="aot_eager", fullgraph=True)(weights, x)
    causes, cause = [], caught.value
    while cause is not None:
        causes.append(str(cause))
        cause = cause.__cause__
    assert any("Compile without fullgraph=True" in text for text in causes)
