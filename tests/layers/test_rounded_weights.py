"""Recipes that round weights to MXFP4 before they quantize them: every reader of a weight has the rounded values."""

import copy
from dataclasses import replace

import pytest
import torch
from cases import normal, rounded, with_gradients
from routings import ends
from torch import nn

import tritonfp8
from tritonfp8 import QuantSpec, functional, recipes, reference
from tritonfp8.layers.moe.grouped import quantize_weights
from tritonfp8.layers.stored import StoredWeight
from tritonfp8.recipes import Gemm, Recipe
from tritonfp8.specs import EXPANDED, MXFP4
from tritonfp8.specs.formats import HIGH_PRECISION_DTYPES
from tritonfp8.specs.testing import assert_bitwise_equal

NAME = "mxfp4_weights"
BLOCKS = QuantSpec("e4m3", (1, 32), "e8m0", "pow2")
# Each with the recipe that computes the same from a weight that is rounded already.
VARIANTS = {
    "values": recipes.get(NAME),
    "codes": recipes.get(NAME, transposed_from="codes"),
    "dequantized": recipes.get(NAME, backward="dequantized"),
    "precise gradients": replace(recipes.get(NAME), grad_input=Gemm(), grad_weight=Gemm()),
    "blocks": replace(recipes.get("mxfp8"), weights=MXFP4),
}
each_variant = pytest.mark.parametrize("recipe", VARIANTS.values(), ids=VARIANTS)
SHAPE = (40, 136, 200)


def leaves(dtype=torch.bfloat16, weight=None):
    m, n, k = SHAPE
    found = normal(m, k, dtype=dtype), normal(n, k, seed=1, dtype=dtype), normal(n, seed=2, dtype=dtype)
    x, w, b = (t.requires_grad_() for t in found)
    return x, w if weight is None else weight.detach().requires_grad_(), b


def results(run, tensors):
    out = run(*tensors)
    return with_gradients(out, tensors, normal(*out.shape, seed=3, dtype=out.dtype))


@each_variant
@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES, ids=str)
def test_a_layer_computes_with_the_rounded_weight_and_hands_its_gradient_on(recipe, dtype):
    plain, tensors = replace(recipe, weights=None), leaves(dtype)
    expected = results(lambda *x: functional.linear(*x, plain), leaves(dtype, rounded(tensors[1], recipe)))
    assert_bitwise_equal(results(lambda *x: functional.linear(*x, recipe), tensors), expected)
    assert not torch.equal(functional.linear(*tensors, plain), expected[0])


@each_variant
def test_so_do_experts(recipe):
    def made(which, round_weights):
        torch.manual_seed(0)
        experts = tritonfp8.Float8Experts(3, 96, 64, recipe=which, bias=True, dtype=torch.bfloat16)
        for parameter in experts.parameters() if round_weights else ():
            if parameter.ndim == 3:
                parameter.data.copy_(rounded(parameter.detach(), recipe))
        return experts

    x, index = normal(29, 96, dtype=torch.bfloat16), torch.arange(58).view(29, 2) % 3
    factors = normal(29, 2, seed=2, dtype=torch.bfloat16)
    found = []
    for experts in (made(recipe, False), made(replace(recipe, weights=None), True)):
        leaf = x.clone().requires_grad_()
        found.append(with_gradients(experts(leaf, index, factors), [leaf, *experts.parameters()]))
    assert_bitwise_equal(*found)
    x, weight, offsets = normal(29, 70), normal(3, 24, 70, seed=5), ends([9, 0, 20])
    operands, plain = quantize_weights(weight, recipe), replace(recipe, weights=None)
    expected = functional.grouped_linear(x, rounded(weight, recipe), offsets, None, plain)
    for cached in (None, operands):
        out = functional.grouped_linear(x, weight, offsets, None, recipe, quantized_weight=cached)
        assert_bitwise_equal([out], [expected])


@each_variant
def test_every_way_to_compute_a_layer_has_the_same_bits(recipe):
    model = nn.Sequential(nn.Linear(200, 136), nn.GELU(), nn.Linear(136, 200)).bfloat16()
    tritonfp8.convert(model, recipe)
    parameters = dict(model.named_parameters())
    x = normal(33, 200, dtype=torch.bfloat16)
    run = lambda call: with_gradients(call(x).float(), list(model.parameters()))  # noqa: E731
    expected = run(model)
    assert_bitwise_equal(run(torch.compile(model, backend="aot_eager", fullgraph=True)), expected)
    with tritonfp8.quantize_weights_once(model):
        assert_bitwise_equal(run(model), expected)
    grads = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).float().sum())(parameters)
    out = model(x).float()
    assert_bitwise_equal(list(grads.values()), list(torch.autograd.grad(out.sum(), list(model.parameters()))))


def test_a_graph_saves_for_backward_what_it_saves_without_rounding():
    def saved_by(name):
        model = nn.Sequential(nn.Linear(256, 384), nn.GELU(), nn.Linear(384, 256)).bfloat16()
        tritonfp8.convert(model, name)
        torch._dynamo.reset()
        compiled, found = torch.compile(model, backend="aot_eager", fullgraph=True), []
        x = normal(64, 256, dtype=torch.bfloat16).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append((t.shape, t.dtype)) or t, lambda t: t):
            compiled(x)
        return found

    assert saved_by(NAME) == saved_by("rowwise")


def test_compiled_experts_have_the_same_bits():
    torch.manual_seed(0)
    experts = tritonfp8.Float8Experts(3, 96, 64, recipe=NAME, dtype=torch.bfloat16)
    x, index = normal(29, 96, dtype=torch.bfloat16), torch.arange(58).view(29, 2) % 3
    factors = normal(29, 2, seed=2, dtype=torch.bfloat16)
    found = [
        with_gradients(call(x, index, factors).float(), list(experts.parameters()))
        for call in (experts, torch.compile(experts, backend="aot_eager"))
    ]
    assert_bitwise_equal(*found)


def test_inference_runs_on_codes_with_the_bits_of_training():
    model = nn.Sequential(nn.Linear(256, 384), nn.GELU(), nn.Linear(384, 256)).bfloat16()
    tritonfp8.convert(model, NAME)
    x, masters = normal(33, 256, dtype=torch.bfloat16), [layer.weight.detach().clone() for layer in model[::2]]
    expected, leaf = model(x).detach(), x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(leaf).float().square().sum(), leaf)
    tritonfp8.convert(model, NAME, mode="inference")
    assert_bitwise_equal([model(x)], [expected])
    (found,) = torch.autograd.grad(model(leaf).float().square().sum(), leaf)
    assert_bitwise_equal([found], [grad])
    for layer, master in zip(model[::2], masters, strict=True):
        assert type(layer.weight) is StoredWeight
        assert layer.weight.nbytes * 8 == 4.25 * master.numel() + 32 * len(master)
        assert_bitwise_equal(list(layer.weight._both()), list(reference.quantize(master, *MXFP4.args)))
    assert_bitwise_equal([torch.compile(model, backend="aot_eager")(x)], [expected])
    tritonfp8.swap_recipe(model, "rowwise")
    assert_bitwise_equal([model(x)], [expected])
    tritonfp8.swap_recipe(model, NAME)
    tritonfp8.revert(model)
    assert_bitwise_equal([model[0].weight], [rounded(masters[0], recipes.get(NAME))])


def test_training_falls_and_moves_every_weight():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    target = copy.deepcopy(model).requires_grad_(False)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    tritonfp8.convert(model, NAME)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0), []
    for step in range(30):
        x = normal(256, 64, seed=step)
        loss = (model(x) - target(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    # Straight through: no gradient of a master is lost, however small its step.
    assert all((p != b).float().mean() > 0.99 for p, b in zip(model.parameters(), before, strict=True))


def stored_for_rowwise():
    layer = nn.Linear(64, 32).bfloat16()
    tritonfp8.convert(layer, "rowwise", mode="inference")
    return layer


def test_codes_that_were_not_rounded_are_refused():
    layer, x = stored_for_rowwise(), normal(8, 64, dtype=torch.bfloat16)
    message = "is stored as e4m3 rowwise.*'mxfp4_weights' reads e2m1 1x32.*convert the model again"
    with pytest.raises(ValueError, match=message):
        tritonfp8.swap_recipe(nn.ModuleDict({"it": layer}), NAME)
    with pytest.raises(ValueError, match="reads weights that are rounded to e2m1 1x32.*has codes of e4m3 rowwise"):
        functional.linear(x, layer.weight, None, NAME)


def test_what_cannot_be_stored_is_an_error_and_nothing_is_converted():
    def refuses(layer, message, **options):
        model = nn.ModuleDict({"it": layer})
        with pytest.raises(ValueError, match=message):
            tritonfp8.convert(model, NAME, **options)
        assert type(model["it"]) is nn.Linear

    message = "it requires a gradient and is torch.bfloat16.*call model.float"
    refuses(nn.Linear(64, 32).bfloat16(), message, weight_storage="quantized")
    refuses(nn.Linear(67, 32), "it: e2m1.*odd number of in features: leave it out by filter=", mode="inference")


@pytest.mark.parametrize("output", [Gemm(), Gemm(QuantSpec("e4m3"), QuantSpec("e4m3"))], ids=str)
def test_a_recipe_must_hold_the_values_that_it_rounds_to(output):
    with pytest.raises(ValueError, match="weights that are rounded to e2m1 1x32.*recipe 'r' rounds them to that, and"):
        Recipe("r", output=output, weights=MXFP4)
    with pytest.raises(ValueError, match="rounded to e4m3 rowwise"):
        Recipe("r", output=Gemm(EXPANDED, EXPANDED), weights=EXPANDED)
    with pytest.raises(TypeError, match="weights must be a QuantSpec or None; got"):
        Recipe("r", output=Gemm(EXPANDED, EXPANDED), weights="e2m1")


def test_a_recipe_keeps_its_rounding_in_files_and_others_have_none():
    recipe = recipes.get(NAME)
    assert Recipe.from_toml(recipe.to_toml()) == Recipe.from_json(recipe.to_json()) == recipe
    assert recipes.recipe_of(*recipe.args).weights == recipe.weights == recipe.storage == MXFP4
    assert "weights" not in recipes.get("rowwise").to_dict()
    assert "weight is rounded to the values of Q[e2m1 1x32 (e8m0 floor)](weight)" in str(recipe)
    assert "rounded" not in str(recipes.get("rowwise"))
    assert VARIANTS["blocks"].output.rhs == BLOCKS


def test_health_measures_what_is_quantized():
    """MXFP4 is exact in e4m3, so the cast of the rounded weight has no noise."""
    model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 32))
    tritonfp8.convert(model, {"0": NAME, "1": "rowwise"})
    with tritonfp8.monitor(model) as stats:
        model(normal(16, 128)).sum().backward()
    (layers,) = stats.to_dict().values()
    assert layers["0"]["weight"]["sqnr"] == float("inf")
    assert 20 < layers["1"]["weight"]["sqnr"] < 60
