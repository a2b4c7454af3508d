"""Forwards that other programs put in the places of modules' own: a generator runs them around its modules."""

import functools

import peft
import pytest
import torch
from rollout_models import IDS, generate, trainer
from trl.trainer import add_fused_lm_head

import tritonfp8
from tritonfp8.rollout import Rollout, log_probs


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def test_a_forward_that_was_replaced_and_hooks_of_this_package():
    model = trainer()
    inner = type(model.model.layers[0]).forward
    model.model.layers[0].forward = (lambda self, *args, **options: inner(self, *args, **options) * 2).__get__(
        model.model.layers[0]
    )
    with tritonfp8.monitor(model):
        rollout = Rollout(model)
    assert rollout.model.model.layers[0].forward.__self__ is rollout.model.model.layers[0]
    assert torch.equal(logits(rollout.model), logits(model))
    of_hooks = [m for m in rollout.model.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert of_hooks == []


def twice(forward):
    """As a wrapper that accelerate puts around a forward: it calls the forward from before, and itself."""

    def wrapped(*args, again=True, **options):
        return wrapped(*args, again=False, **options) if again else forward(*args, **options)

    return wrapped


WRAPPERS = {
    "closure": twice,
    "partial": functools.partial(functools.partial, lambda forward, *args, **options: forward(*args, **options)),
    "partial by name": lambda forward: functools.partial(
        lambda *args, forward, **o: forward(*args, **o), forward=forward
    ),
}


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_forward_that_calls_the_one_it_replaced_runs_the_generators_modules(wrap):
    model = trainer()
    for module in (model, model.model.layers[1]):
        module.forward = WRAPPERS[wrap](module.forward)
    rollout, ran = Rollout(model), []
    for each in (model, rollout.model):
        each.model.layers[0].mlp.register_forward_hook(lambda module, args, out: ran.append(module))
    assert torch.equal(logits(rollout.model), logits(model))
    assert ran == [rollout.model.model.layers[0].mlp, model.model.layers[0].mlp]
    generate(rollout)
    assert set(ran[2:]) == {rollout.model.model.layers[0].mlp}


def test_the_head_that_trl_adds_to_a_trainer_is_the_generators_in_a_rollout():
    model = trainer()
    add_fused_lm_head(model)
    rollout = Rollout(model)
    ran = []
    model.register_forward_pre_hook(lambda *args: ran.append(args))
    model.model.register_forward_pre_hook(lambda *args: ran.append(args))
    found = generate(rollout)
    assert ran == []
    scored = log_probs(model, found.sequences, found.attention_mask, 6)
    torch.testing.assert_close(scored, found.log_probs, atol=0.1, rtol=0)


def test_a_trainer_with_gradient_checkpointing_and_inputs_that_need_gradients():
    """As adapters of peft train: transformers keeps a list of its hooks in the model."""
    model = peft.get_peft_model(trainer(), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    rollout = Rollout(model)
    found = generate(rollout)
    scored = log_probs(model.train(), found.sequences, found.attention_mask, 6)
    torch.testing.assert_close(scored, found.log_probs, atol=0.1, rtol=0)
    scored.sum().backward()
    assert all(x.grad is not None for name, x in model.named_parameters() if "lora" in name)
