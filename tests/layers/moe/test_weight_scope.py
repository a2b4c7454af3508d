"""Experts inside ``quantize_weights_once``."""

import copy

import pytest
import torch
from cases import each_recipe, normal
from mixtures import model_of
from torch import nn

import tritonfp8
from tritonfp8 import Float8Experts, functional, recipes
from tritonfp8.specs.testing import assert_bitwise_equal

pytestmark = pytest.mark.one_in(3)


def batch(hidden, experts, tokens=9):
    index = torch.arange(2 * tokens).view(tokens, 2) % experts
    return normal(tokens, hidden), index, normal(tokens, 2, seed=1).softmax(1)


class TestQuantizeWeightsOnce:
    def accumulated(self, model, times=2):
        torch.manual_seed(1)
        for _ in range(times):
            ids = torch.randint(0, 96, (2, 12))
            model(ids, labels=ids).loss.backward()
        grads = [p.grad for p in model.parameters()]
        model.zero_grad()
        return grads

    @each_recipe
    def test_the_same_gradients_from_one_cast(self, recipe):
        model = model_of("gpt_oss")
        tritonfp8.convert(model, recipe)
        expected = self.accumulated(model)
        with tritonfp8.quantize_weights_once(model), torch.profiler.profile() as profile:
            found = self.accumulated(model)
        assert_bitwise_equal(found, expected)
        assert not any("quantize_matrices" in event.name for event in profile.events())
        assert_bitwise_equal(self.accumulated(model), expected)

    def test_changes(self):
        model = model_of("mixtral")
        tritonfp8.convert(model, "rowwise")
        ids = torch.randint(0, 96, (2, 12))
        experts = model.model.layers[1].mlp.experts
        # Changes that torch counts are errors at the next use, and others when the block ends.
        for change, message in (
            (lambda: (experts.down_proj.detach().mul_(2), model(ids)), "changed inside"),
            (lambda: experts.down_proj.data.mul_(2), r"model.layers.1.mlp.experts.down_proj"),
        ):
            with pytest.raises(RuntimeError, match=message), tritonfp8.quantize_weights_once(model):
                change()
        assert not experts.cached_weights
        with tritonfp8.quantize_weights_once(model):
            with pytest.raises(ValueError, match="blocks do not nest"), tritonfp8.quantize_weights_once(model):
                pass
            assert experts.cached_weights
            copied = copy.deepcopy(experts)
            with pytest.raises(ValueError, match="revert after the block"):
                tritonfp8.revert(model)
        assert not experts.cached_weights
        assert copied(*batch(64, 4)).isfinite().all()

    def test_experts_alone_and_on_meta(self):
        experts = Float8Experts(4, 32, 48, recipe="rowwise", device="meta")
        with pytest.raises(TypeError, match="must have data"), tritonfp8.quantize_weights_once(experts):
            pass
        experts = Float8Experts(4, 32, 48, recipe="rowwise")
        args = batch(32, 4)
        expected = experts(*args)
        with tritonfp8.quantize_weights_once(experts, torch.float32):
            assert_bitwise_equal(experts(*args), expected)

    def test_parametrized_weights_are_computed_and_quantized_in_each_pass(self):
        """As LoRA computes the parameters of experts."""

        class Twice(nn.Module):
            def forward(self, x):
                return 2 * x

        experts, args = Float8Experts(4, 32, 48, recipe="rowwise"), batch(32, 4)
        before = experts(*args)
        nn.utils.parametrize.register_parametrization(experts, "down_proj", Twice())
        expected = experts(*args)
        assert not torch.equal(expected, before)
        with tritonfp8.quantize_weights_once(experts):
            experts.parametrizations.down_proj.original.data.mul_(2)
            assert_bitwise_equal(experts(*args), 2 * expected)

    @each_recipe
    def test_training_in_a_block_for_inference(self, recipe):
        experts, (hidden, *routing) = Float8Experts(3, 40, 24, recipe=recipe), batch(40, 3)
        with torch.no_grad(), tritonfp8.quantize_weights_once(experts):
            experts(hidden, *routing)
            if recipes.get(recipe).grad_input.rhs is None:
                return
            with (
                torch.enable_grad(),
                pytest.raises(ValueError, match="quantize_weights_once was opened under .*no_grad.*, open it where"),
            ):
                experts(hidden.requires_grad_(), *routing)

    def test_operands_of_another_weight_are_an_error(self):
        recipe, weight = recipes.get("rowwise"), normal(3, 24, 40)
        gemms = ((recipe.output, False), (recipe.grad_input, True))
        cached = [functional.quantize_matrices(weight, gemm.rhs, transpose) for gemm, transpose in gemms]
        input, offsets = normal(11, 40).requires_grad_(), torch.tensor([4, 4, 10], dtype=torch.int32)
        out = functional.grouped_linear(input, weight, offsets, quantized_weight=tuple(cached))
        assert_bitwise_equal(out, functional.grouped_linear(input, weight, offsets))
        for wrong, error, message in (
            (cached[::-1], ValueError, r"must hold the weight .* of shape \(3, 24, 40\); got .*\(3, 40, 24\)"),
            ([cached[0], None], ValueError, "yourself must have the transposed weight, too"),
            (cached[0], TypeError, "must be a pair"),
        ):
            with pytest.raises(error, match=message):
                functional.grouped_linear(input, weight, offsets, quantized_weight=wrong)
