"""Float8Callback in Hugging Face's Trainer, in one process."""

import logging

import pytest
import torch
from callback_cases import Tokens, assert_trained, llama, trainer, weights
from cases import QUANTIZED, each_recipe
from mixtures import experts_of, model_of
from torch import nn
from transformers import AutoModelForCausalLM, TrainerCallback

import tritonfp8
from tritonfp8 import Float8Linear, recipes
from tritonfp8.integrations.transformers import Float8Callback, Float8Config, restore, write_config
from tritonfp8.layers.moe import is_converted_experts
from tritonfp8.specs.testing import assert_bitwise_equal


class Steps(TrainerCallback):
    """Notes the recipe of a layer in each step, and poisons a weight before one."""

    def __init__(self, poison=None):
        self.recipes, self.poison = [], poison

    def on_step_end(self, args, state, control, model, **kwargs):
        self.recipes.append(model.model.layers[0].mlp.up_proj.recipe.name)

    def on_step_begin(self, args, state, control, model, **kwargs):
        if state.global_step == self.poison:
            model.model.norm.weight.data.fill_(float("nan"))


def losses(run):
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def recipes_of(model):
    return {name: m.recipe for name, m in model.named_modules() if isinstance(m, Float8Linear)}


def check_restored(run, folder, found=recipes_of):
    """A saved model that is loaded gets its recipes from ``restore``, and computes the same bits."""
    run.save_model(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert not found(loaded)
    restore(loaded)
    assert found(loaded) == found(run.model)
    tokens = Tokens()[0]["input_ids"][None]
    assert_bitwise_equal(loaded.eval()(tokens).logits, run.model.eval()(tokens).logits)


@pytest.mark.one_in(3)
@each_recipe
def test_the_callback_trains_as_convert_before_the_trainer(tmp_path, recipe):
    by_hand = llama()
    before = weights(by_hand)
    tritonfp8.convert(by_hand, recipe)
    expected = trainer(by_hand, tmp_path)
    expected.train()
    model, callback = llama(), Float8Callback(recipe)
    run = trainer(model, tmp_path, callback)
    run.train()
    assert recipes_of(model) == callback.report.converted == recipes_of(by_hand)
    assert callback.gathered is None
    assert losses(run) == losses(expected)
    assert_trained(model, before, by_hand)


@pytest.mark.parametrize(
    "names",
    [
        ("mxfp8", "blockwise", "rowwise"),
        ("bf16", "tensorwise", "rowwise_hp_grad_weight"),
        ("mxfp4_weights", "rowwise", "bf16"),
    ],
)
def test_a_saved_model_is_restored_with_its_recipes(tmp_path, names):
    of_mlp, of_queries, of_others = names
    model = llama()
    config = Float8Config({"*.mlp.*": of_mlp, "*q_proj": recipes.get(of_queries), "*.1.*": of_others})
    run = trainer(model, tmp_path, Float8Callback(config))
    run.train()
    assert len({recipe.name for recipe in recipes_of(model).values()}) == 3
    check_restored(run, tmp_path / "saved")


def test_a_model_that_was_saved_without_recipes_says_what_to_do():
    with pytest.raises(ValueError, match=r"tritonfp8.convert\(model, recipe\)"):
        restore(llama())
    with pytest.raises(TypeError, match="Linear"):
        write_config(nn.Linear(2, 2))


def test_the_schedule_follows_the_steps_of_the_trainer(tmp_path):
    model, steps = llama(), Steps()
    schedule = [(0, "bf16"), (1, "rowwise"), ("75%", "bf16")]
    run = trainer(model, tmp_path, Float8Callback(Float8Config(schedule=schedule)), steps)
    run.train()
    assert steps.recipes == ["bf16", "rowwise", "rowwise", "bf16"]
    assert {entry["recipe"]["name"] for entry in model.config.tritonfp8} == {"bf16"}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_scheduled_run_is_resumed_to_the_same_bits(tmp_path, accumulate, recipe):
    def make(**options):
        callback = Float8Callback(Float8Config(schedule=[(0, "bf16"), (1, recipe), (3, "bf16")]))
        steps = Steps()
        options = {"gradient_accumulation_steps": accumulate, **options}
        return trainer(llama(), tmp_path, callback, steps, **options), steps

    whole, _ = make(save_strategy="steps", save_steps=2)
    whole.train()
    resumed, steps = make()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert steps.recipes == [recipe, "bf16"]
    assert_bitwise_equal(weights(resumed.model), weights(whole.model))


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    options = {"eval_strategy": "steps", "save_strategy": "steps", "save_steps": 2, "eval_steps": 2}
    # The loss grows with such a learning rate, so the first checkpoint is the best.
    run = trainer(llama(), tmp_path, Float8Callback(), load_best_model_at_end=True, learning_rate=1.0, **options)
    run.train()
    assert run.state.best_model_checkpoint.endswith("checkpoint-2")
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2", dtype=torch.float32)
    assert_bitwise_equal(weights(run.model), weights(best))
    assert recipes_of(run.model)


@pytest.mark.parametrize(("poison", "steps"), [(2, [3, 4]), (None, [])])
def test_a_loss_that_the_trainer_leaves_out_is_reported(tmp_path, caplog, poison, steps):
    with caplog.at_level(logging.WARNING, "tritonfp8"):
        run = trainer(llama(), tmp_path, Float8Callback(), Steps(poison))
        run.train()
    messages = [record.message.split(" had ")[0] for record in caplog.records]
    assert messages == [f"1 of the last steps before step {step}" for step in steps]
    # The Trainer's own log hides it.
    assert all(loss == loss for loss in losses(run))


@pytest.mark.parametrize("verify", [True, False])
def test_weights_that_the_first_step_does_not_move_are_named(tmp_path, verify, recwarn):
    """In bf16 such a step is lost in rounding, except for weights near zero; the Trainer says nothing."""
    model = llama().bfloat16()
    trainer(model, tmp_path, Float8Callback(Float8Config(verify=verify)), learning_rate=1e-7).train()
    messages = [str(each.message) for each in recwarn if "trainable weights moved" in str(each.message)]
    assert len(messages) == verify
    assert not verify or "model.norm.weight" in messages[0]


def test_the_step_that_is_checked_has_a_learning_rate(tmp_path, recwarn):
    callback = Float8Callback()
    run = trainer(llama(), tmp_path, callback, warmup_steps=2, lr_scheduler_type="linear")
    run.train()
    assert callback._is_checked
    assert not [each for each in recwarn if "trainable weights moved" in str(each.message)]


def test_a_compiled_model_is_converted_inside(tmp_path):
    model = llama()
    compiled = torch.compile(model, backend="aot_eager")
    run = trainer(compiled, tmp_path, Float8Callback("rowwise"), remove_unused_columns=False, max_steps=2)
    before = weights(model)
    run.train()
    assert len(recipes_of(model)) >= 14
    assert_trained(model, before)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_blocks_that_are_compiled_one_by_one_train_to_the_bits_of_eager_ones(tmp_path, checkpointing, monkeypatch):
    """With a recipe that changes, and a health report; compiled, the model is a copy that holds the same layers."""

    def run(compiled):
        monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", str(int(compiled)))
        config = Float8Config(schedule=[(0, "bf16"), (2, "rowwise")], health_every=3)
        options = {"torch_compile": True, "torch_compile_backend": "aot_eager"} if compiled else {}
        made = trainer(
            llama(), tmp_path, Float8Callback(config), gradient_checkpointing=checkpointing,
            remove_unused_columns=False, **options,
        )  # fmt: skip
        before = weights(made.model)
        made.train()
        assert made.accelerator.state.dynamo_plugin.use_regional_compilation == compiled
        assert_trained(made.model, before)
        logged = [entry["step"] for entry in made.state.log_history if "fp8/worst_layer" in entry]
        return losses(made), logged, recipes_of(made.model), weights(made.model)

    (*expected, eager), (*found, compiled) = run(False), run(True)
    assert found == expected
    assert_bitwise_equal(compiled, eager)


def experts_recipes(model):
    return {name: module.recipe for name, module in experts_of(model).items() if is_converted_experts(module)}


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_train_are_saved_and_restored(tmp_path, family):
    model, by_hand = model_of(family), model_of(family)
    before = weights(model)
    config = Float8Config({"*.0.mlp.experts": "mxfp8", "*": "rowwise"})
    tritonfp8.convert(by_hand, config.recipe)
    run, expected = trainer(model, tmp_path, Float8Callback(config)), trainer(by_hand, tmp_path)
    run.train()
    expected.train()
    assert {recipe.name for recipe in experts_recipes(model).values()} == {"mxfp8", "rowwise"}
    assert_trained(model, before, by_hand)
    check_restored(run, tmp_path / "saved", experts_recipes)


def test_a_schedule_swaps_the_recipe_of_experts(tmp_path):
    model = model_of("qwen3_moe")
    seen = []

    class Swaps(Float8Callback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            super().on_step_end(args, state, control, model=model, **kwargs)
            seen.append({recipe.name for recipe in experts_recipes(model).values()})

    trainer(model, tmp_path, Swaps(Float8Config(schedule=[(0, "bf16"), (1, "rowwise")]))).train()
    assert seen[:2] == [{"bf16"}, {"rowwise"}]
