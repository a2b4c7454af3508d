"""monitor() of converted experts: each of their weights is a layer."""

import logging

import pytest
import torch
from cases import normal
from figures import measure
from mixtures import FAMILIES, experts_of, model_of

import tritonfp8
from tritonfp8 import Float8Experts, recipes
from tritonfp8.workflow.health import FIELDS

RECIPES = ["tensorwise", "rowwise", "blockwise", "mxfp8", "rowwise_hp_grad_weight"]


def experts_of_tokens(tokens):
    """Two of four experts for each token, ``[tokens, 2]``."""
    i = torch.arange(tokens)
    return torch.stack([i % 4, (i + 1 + i % 3) % 4], 1)


class Mixture(torch.nn.Module):
    """Experts with a given routing, two for each token."""

    def __init__(self, recipe="rowwise"):
        super().__init__()
        torch.manual_seed(0)
        self.experts = Float8Experts(4, 64, 48, recipe=recipe)

    def forward(self, x):
        return self.experts(x, experts_of_tokens(len(x)), normal(len(x), 2, seed=3).softmax(-1))


def figures_of(model, x):
    """The figures of one step, by layer and operand."""
    with tritonfp8.monitor(model, every=1) as stats:
        model(x).square().sum().backward()
        stats.step()
    return stats.to_dict()[0], stats


def measured(x, spec):
    return dict(zip(FIELDS, measure(x, spec, 1024).tolist(), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_operand_of_every_family(family):
    model = model_of(family)
    tritonfp8.convert(model, "rowwise")
    ids = torch.randint(0, 96, (2, 12))
    with tritonfp8.monitor(model, every=1) as stats:
        model(ids, labels=ids).loss.backward()
        stats.step()
    found = stats.to_dict()[0]
    for name in experts_of(model):
        for key in ("gate_up_proj", "down_proj"):
            operands = found[f"{name}.{key}"]
            assert set(operands) == {"input", "weight", "grad_output"}
            assert all(20 < figures["sqnr"] < 50 for figures in operands.values())


@pytest.mark.parametrize("recipe", RECIPES)
def test_figures_are_those_of_what_the_gemms_read(recipe):
    model, x = Mixture(recipe), normal(20, 64, seed=1).requires_grad_()
    found, _ = figures_of(model, x)
    rule, experts = recipes.get(recipe), model.experts
    for name, weight in experts.weights().items():
        each = [measured(matrix.detach(), rule.output.rhs) for matrix in weight]
        figures = found[f"experts.{name}"]["weight"]
        assert figures["sqnr"] == min(one["sqnr"] for one in each)
        for field in ("amax", "scale_max", "flushed_share", "outlier_ratio"):
            assert figures[field] == max(one[field] for one in each)
        worst = max(each, key=lambda one: one["outlier_ratio"])
        assert figures["outlier_channel"] == worst["outlier_channel"]
    # The rows of experts, each computed by itself.
    order = experts_of_tokens(20).flatten()
    rows = torch.argsort(order, stable=True)
    tokens, factors = x.detach()[rows // 2], normal(20, 2, seed=3).softmax(-1).flatten()[rows]
    offsets = torch.bincount(order, minlength=4).cumsum(0).to(torch.int32)
    inner = experts.grouped(tokens, experts.gate_up_proj.detach(), offsets).requires_grad_()
    inside = experts.activation(inner)
    inside.retain_grad()
    out = experts.grouped(inside, experts.down_proj.detach(), offsets)
    whole = model(x)
    grad = 2 * whole.detach()[rows // 2] * factors[:, None]
    out.backward(grad)
    for name, x, gradient in (("gate_up_proj", tokens, inner.grad), ("down_proj", inside.detach(), grad)):
        operands = found[f"experts.{name}"]
        assert operands["input"] == measured(x, rule.output.lhs)
        assert operands["grad_output"] == pytest.approx(measured(gradient, rule.grad_input.lhs), rel=1e-6)


def test_one_bad_expert_is_found_and_named(caplog):
    model = Mixture()
    model.experts.down_proj.data[2] = 0
    model.experts.gate_up_proj.data[1, 5, 7] = torch.nan
    with caplog.at_level(logging.WARNING, "tritonfp8"):
        figures, stats = figures_of(model, normal(20, 64, seed=1))
    assert figures["experts.down_proj"]["weight"]["zero_share"] == 1
    found = {(each.layer, each.operand, each.problem) for each in stats.findings}
    assert ("experts.gate_up_proj", "weight", "not finite") in found
    assert "experts.gate_up_proj" in caplog.text


def test_a_monitored_step_has_the_same_bits_and_leaves_nothing_and_so_does_an_error():
    gradients = []
    for monitored in (False, True):
        model, x = Mixture(), normal(20, 64, seed=1)
        if monitored:
            figures_of(model, x)
        else:
            model(x).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        assert model.experts.observer is None
    assert all(map(torch.equal, *gradients))
    with pytest.raises(RuntimeError, match="of the caller"), tritonfp8.monitor(model, every=1):
        raise RuntimeError("of the caller")
    assert model.experts.observer is None


def test_compiled_code_is_not_compiled_again():
    model, x = Mixture(), normal(20, 64, seed=1)
    compiled = torch.compile(model, backend="eager")
    with tritonfp8.monitor(compiled, every=2, first_step=1) as stats:
        for _ in range(2):
            compiled(x).sum().backward()
            stats.step()
        torch._dynamo.config.error_on_recompile = True
        try:
            compiled(x).sum().backward()
        finally:
            torch._dynamo.config.error_on_recompile = False
        stats.step()
    assert list(stats.to_dict()) == [2]
    assert set(stats.to_dict()[2]) == {"experts.gate_up_proj", "experts.down_proj"}


def test_rows_of_a_caller_of_compute_are_seen():
    """Experts over ranks call compute() with the rows that they received."""
    model = Mixture()
    rows, offsets = normal(12, 64, seed=2), torch.tensor([3, 3, 9, 12], dtype=torch.int32)
    with tritonfp8.monitor(model, every=1) as stats:
        weights = list(model.experts.weights().values())
        model.experts.compute(rows, offsets, weights, [None, None]).sum().backward()
        stats.step()
    found = stats.to_dict()[0]
    assert found["experts.gate_up_proj"]["input"] == measured(rows, recipes.get("rowwise").output.lhs)
    assert set(found["experts.down_proj"]) == {"input", "weight", "grad_output"}


class TestSensitivity:
    def test_errors_are_those_of_the_worst_expert(self):
        """A layer for each expert, with its tokens only, has the errors that experts are measured by."""
        model, x = Mixture("bf16"), normal(20, 64, seed=1)
        found = tritonfp8.sensitivity(model, x, ["rowwise", "tensorwise"])
        assert list(found.errors) == ["experts"]
        order = experts_of_tokens(20)
        for recipe in ("rowwise", "tensorwise"):
            single = []
            for i, weight in enumerate(model.experts.gate_up_proj.detach()):
                layer = torch.nn.Linear(64, 96, bias=False)
                layer.weight.data.copy_(weight)
                of_one = tritonfp8.sensitivity(torch.nn.Sequential(layer), x[(order == i).any(1)], [recipe])
                single.append(of_one.errors["0"][recipe]["output"])
            # Errors of the other weight may be larger.
            assert max(single) <= found.errors["experts"][recipe]["output"] < max(single) + 3
        assert set(found.errors["experts"]["rowwise"]) == {"output", "grad_input", "grad_weight"}
        assert model.experts.observer is None

    def test_a_mapping_reaches_them(self):
        model = model_of("mixtral")
        tritonfp8.convert(model, "rowwise")
        ids = torch.randint(0, 96, (2, 12))
        found = tritonfp8.sensitivity(model, {"input_ids": ids, "labels": ids}, ["rowwise", "mxfp8"])
        assert set(experts_of(model)) <= set(found.errors)
        assert {experts.recipe.name for experts in experts_of(model).values()} == {"rowwise"}
        tritonfp8.swap_recipe(model, found.mapping(max_error_db=-1000.0))
        assert {experts.recipe.name for experts in experts_of(model).values()} == {"bf16"}

    def test_an_expert_without_tokens_is_left_out(self):
        model = Mixture("bf16")
        model.experts.gate_up_proj.data[3] = torch.nan
        # The experts of one token are two others.
        found = tritonfp8.sensitivity(model, normal(1, 64, seed=1), ["rowwise"])
        assert -60 < found.error("experts", "rowwise") < -20
