"""Models with experts in Hugging Face's Trainer, by Float8Callback."""

import pytest
import torch
from callback_cases import Tokens, trainer
from mixtures import experts_of, model_of
from transformers import AutoModelForCausalLM

import tritonfp8
from tritonfp8.integrations.transformers import Float8Callback, Float8Config, restore
from tritonfp8.layers.moe import is_converted_experts
from tritonfp8.testing import assert_bitwise_equal


def recipes_of(model):
    return {name: module.recipe for name, module in experts_of(model).items() if is_converted_experts(module)}


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_train_are_saved_and_restored(tmp_path, family):
    model = model_of(family)
    by_hand = model_of(family)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = Float8Config({"*.0.mlp.experts": "mxfp8", "*": "rowwise"}, experts=True)
    tritonfp8.convert(by_hand, config.recipe, experts=True)
    run, expected = trainer(model, tmp_path, Float8Callback(config)), trainer(by_hand, tmp_path)
    run.train()
    expected.train()
    assert {recipe.name for recipe in recipes_of(model).values()} == {"mxfp8", "rowwise"}
    for name, p in model.named_parameters():
        assert not torch.equal(p, before[name]), f"{name} did not train"
        assert_bitwise_equal(p, by_hand.get_parameter(name))
    run.save_model(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert not recipes_of(loaded)
    restore(loaded)
    assert recipes_of(loaded) == recipes_of(model)
    tokens = Tokens()[0]["input_ids"][None]
    model.eval(), loaded.eval()
    assert_bitwise_equal(loaded(tokens).logits, model(tokens).logits)


def test_a_schedule_swaps_the_recipe_of_experts(tmp_path):
    model = model_of("qwen3_moe")
    seen = []

    class Steps(Float8Callback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            super().on_step_end(args, state, control, model=model, **kwargs)
            seen.append({recipe.name for recipe in recipes_of(model).values()})

    trainer(model, tmp_path, Steps(Float8Config(schedule=[(0, "bf16"), (1, "rowwise")], experts=True))).train()
    assert seen[0] == {"bf16"}
    assert seen[1] == {"rowwise"}
