"""sensitivity() ranks layers by the error of each recipe, proposes a recipe for each, and changes nothing."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from cases import normal
from torch import nn
from transformers import BatchEncoding, BertConfig, BertModel, LlamaConfig, LlamaModel

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.functional import linear
from tritonfp8.recipes import Recipe
from tritonfp8.specs.testing import assert_bitwise_equal
from tritonfp8.workflow.health.gemm_errors import relative_noise

RECIPES = ("tensorwise", "rowwise", "blockwise")


class Branches(nn.Module):
    """Three layers that read inputs of their own; the input of ``planted`` has an outlier channel."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.planted, self.last = (nn.Linear(128, 128) for _ in range(3))
        self.drop, self.norm = nn.Dropout(0.1), nn.BatchNorm1d(128)

    def forward(self, x):
        outlier = torch.ones(x.shape[-1])
        outlier[3] = 1e6
        planted = self.planted(x * outlier) / 1e6
        return self.norm(self.drop(self.first(x))) + planted + self.last(x)


def batch():
    return normal(64, 128, seed=1)


@pytest.fixture(scope="module")
def found():
    grad = normal(64, 128, seed=2)
    return tritonfp8.sensitivity(Branches(), batch(), RECIPES, loss=lambda model, x: (model(x) * grad).sum())


def names(mapping):
    return {layer: recipe.name for layer, recipe in mapping.items()}


def test_a_layer_with_planted_outliers_is_ranked_first_and_scales_of_each_channel_serve_it(found):
    assert found.ranking("tensorwise")[0] == found.ranking()[0] == "planted"
    assert found.error("planted", "tensorwise") > -3
    assert all(found.error(layer, "tensorwise") < -20 for layer in ("first", "last"))
    lines = str(found).splitlines()
    assert lines[0].startswith("2 of 3 layers are within -20 dB by ")
    assert lines[1].split() == ["layer", *RECIPES, "choice"]
    assert lines[2].split()[0] == "planted"
    assert found.error("planted", "rowwise") < -20
    assert names(found.mapping()) == {"first": "tensorwise", "planted": "rowwise", "last": "tensorwise"}


def test_convert_and_swap_recipe_take_the_mapping(found):
    model, mapping = Branches(), found.mapping()
    assert tritonfp8.convert(model, mapping).converted == mapping
    tritonfp8.swap_recipe(model, "blockwise")
    tritonfp8.swap_recipe(model, mapping)
    assert model.planted.recipe.name == "rowwise"
    # Names with the signs of patterns stay names.
    model = nn.Sequential()
    model.add_module("a[0]", nn.Linear(64, 64))
    mapping = tritonfp8.sensitivity(model, batch()[:, :64], ["rowwise"]).mapping()
    assert list(tritonfp8.convert(model, mapping).converted) == ["a[0]"]


def test_errors_and_a_budget_limit_the_mapping(found):
    assert set(names(found.mapping(max_error_db=-100.0)).values()) == {"bf16"}
    limited = found.mapping(max_error_db=-100.0, budget=1)
    assert names(limited) == {"first": "tensorwise", "planted": "bf16", "last": "tensorwise"}
    assert set(names(found.mapping(budget=0)).values()) == {"tensorwise"}
    with pytest.raises(ValueError, match="at least 0"):
        found.mapping(budget=-1)


@pytest.mark.parametrize("recipe", recipes.names())
def test_an_error_is_that_of_the_layer(recipe):
    model, x, grad = nn.Sequential(nn.Linear(96, 160, bias=False)), normal(48, 96), normal(48, 160, seed=1)
    found = tritonfp8.sensitivity(model, x, [recipe], loss=lambda model, x: (model(x) * grad).sum())
    results = {}
    for each in (recipe, None):
        a, w = x.clone().requires_grad_(), model[0].weight.detach().clone().requires_grad_()
        out = nn.functional.linear(a, w) if each is None else linear(a, w, None, each)
        results[each] = (out.detach(), *torch.autograd.grad(out, (a, w), grad))
    errors = found.errors["0"][recipe]
    w = model[0].weight.detach()
    operands = {"output": (x, w), "grad_input": (grad, w.t()), "grad_weight": (grad.t(), x.t())}
    for gemm, actual, expected in zip(errors, results[recipe], results[None], strict=True):
        assert errors[gemm] == pytest.approx(relative_noise(actual - expected, *operands[gemm]).item(), abs=1e-3)
    assert list(errors) == list(recipes.GEMMS)


@pytest.mark.parametrize("convert", [False, True])
def test_the_model_is_as_it_was(convert):
    model = Branches()
    if convert:
        tritonfp8.convert(model, {"last": "mxfp8", "*": "rowwise"})
    model.drop.eval()
    model(batch()).square().mean().backward()
    model.first.weight.grad = None
    before = copy.deepcopy(model.state_dict())
    grads = [p.grad for p in model.parameters()]
    values = [None if g is None else g.clone() for g in grads]
    recipe_objects = [getattr(m, "recipe", None) for m in model.modules()]
    flags, classes = [m.training for m in model.modules()], [type(m) for m in model.modules()]
    state = torch.get_rng_state()
    tritonfp8.sensitivity(model, batch(), RECIPES)
    assert_bitwise_equal(model.state_dict(), before)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert_bitwise_equal([g for g in grads if g is not None], [v for v in values if v is not None])
    assert [m.training for m in model.modules()] == flags
    assert [type(m) for m in model.modules()] == classes
    assert all(getattr(m, "recipe", None) is r for m, r in zip(model.modules(), recipe_objects, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m._forward_hooks for m in model.modules())


def test_an_error_restores_the_model():
    model = Branches()
    tritonfp8.convert(model, "rowwise")
    model(batch()).sum().backward()
    grads = [p.grad for p in model.parameters()]
    with pytest.raises(ZeroDivisionError):
        tritonfp8.sensitivity(model, batch(), RECIPES, loss=lambda model, x: 1 / 0)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert model.first.recipe.name == "rowwise"


def test_a_converted_model_is_compared_in_high_precision():
    plain, converted = Branches().eval(), Branches().eval()
    tritonfp8.convert(converted, "tensorwise")
    assert tritonfp8.sensitivity(plain, batch()).errors == tritonfp8.sensitivity(converted, batch()).errors
    # A frozen model has errors of outputs.
    model = Branches().requires_grad_(False)
    found = tritonfp8.sensitivity(model, batch(), ["rowwise"])
    found = {name: list(errors["rowwise"]) for name, errors in found.errors.items()}
    assert found == {name: ["output"] for name in ("first", "planted", "last")}


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x, labels):
        return SimpleNamespace(loss=(self.layer(x) - labels).square().mean())


class TwoOutputs(WithLoss):
    def forward(self, x):
        return self.layer(x), self.unused(x)


class NoTensors(WithLoss):
    def forward(self, x):
        return SimpleNamespace(logits=self.layer(x))


def test_all_outputs_have_a_part_in_the_loss():
    x, model = batch()[:, :64], TwoOutputs()
    found = tritonfp8.sensitivity(model, x, ["rowwise"])
    assert list(found.errors) == ["layer", "unused"]
    of_all = lambda model, x: sum(out.square().mean() for out in model(x))  # noqa: E731
    assert found.errors == tritonfp8.sensitivity(model, x, ["rowwise"], loss=of_all).errors


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize(("config", "kind"), [(LlamaConfig, LlamaModel), (BertConfig, BertModel)])
def test_a_model_of_transformers_needs_no_labels(config, kind, convert):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = kind(config(vocab_size=64, **sizes))
    ids = torch.arange(24).reshape(2, 12)
    if convert:
        tritonfp8.convert(model, "rowwise")
        assert tritonfp8.verify(model, ids).ok
    found = tritonfp8.sensitivity(model, ids, ["rowwise"])
    layers = [name for name, x in model.named_modules() if isinstance(x, nn.Linear)]
    assert set(found.errors) == set(layers)
    last = next(name for name in found.errors if "down_proj" in name or "output.dense" in name)
    assert list(found.errors[last]["rowwise"]) == ["output", "grad_input", "grad_weight"]
    by_names = tritonfp8.sensitivity(model, BatchEncoding({"input_ids": ids}), ["rowwise"])
    assert by_names.errors == found.errors


def test_batches_and_losses_of_transformers():
    x = batch()[:, :64]
    for form in ({"x": x, "labels": x}, (x, x)):
        # A layer that did not run has no error.
        assert list(tritonfp8.sensitivity(WithLoss(), form).errors) == ["layer"]


def test_a_result_that_cancels_does_not_spoil_the_mean():
    lhs, rhs = torch.randn(32, 100), torch.randn(48, 100)
    lhs[7] -= lhs[7] @ torch.linalg.pinv(rhs) @ rhs
    assert (lhs[7] @ rhs.t()).abs().max() < 1e-4
    signal = lhs.square() @ rhs.square().t()
    error = signal.sqrt() * 0.1 * torch.randn(32, 48).sign()
    assert relative_noise(error, lhs, rhs).item() == pytest.approx(-20, abs=0.01)


def test_relative_noise():
    # Each result is one product, so its square is the signal.
    lhs, rhs = torch.eye(8, 32), torch.randn(16, 32)
    expected = lhs @ rhs.t()
    assert relative_noise(expected * 0, lhs, rhs).item() == -float("inf")
    assert relative_noise(expected * float("nan"), lhs, rhs).item() == float("inf")
    lhs[3] *= 1e6
    lost = lhs @ rhs.t()
    lost[3] = 0
    # All is lost but the largest row, which hides nothing.
    assert relative_noise(lost, lhs, rhs).item() == pytest.approx(10 * math.log10(7 / 8), abs=1e-6)
    lost, zero = torch.randn(8, 16) * 0, torch.zeros(8, 32)
    assert relative_noise(lost, zero, rhs).item() == -float("inf")


def test_a_saved_proposal_converts_as_its_mapping(found, tmp_path):
    path = tmp_path / "recipes.toml"
    for options in ({}, {"budget": 1}, {"max_error_db": -1000.0}):
        found.save(path, **options)
        assert recipes.load(path) == found.mapping(**options)
        by_file, by_mapping = Branches(), Branches()
        report = tritonfp8.convert(by_file, str(path))
        assert report.converted == tritonfp8.convert(by_mapping, found.mapping(**options)).converted
        assert report.converted.keys() == {"first", "planted", "last"}
    with pytest.raises(ValueError, match=r"must end in .toml; got 'recipes.json'"):
        found.save("recipes.json")
    with pytest.raises(TypeError, match="a str or a Path"):
        found.save(None)


def test_mistakes_are_errors():
    with pytest.raises(ValueError, match="one or more of different names"):
        tritonfp8.sensitivity(Branches(), batch(), [])
    with pytest.raises(ValueError, match="one or more of different names"):
        tritonfp8.sensitivity(Branches(), batch(), ["rowwise", Recipe("rowwise")])
    with pytest.raises(TypeError, match="must have a loss or floating tensors; got SimpleNamespace: give loss="):
        tritonfp8.sensitivity(NoTensors(), batch()[:, :64])
    with pytest.raises(ValueError, match="no linear layer"):
        tritonfp8.sensitivity(nn.ReLU(), batch())
