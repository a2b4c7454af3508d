"""Hugging Face's Trainer trains weights that are stored in 8 bits by ``tritonfp8.optim.AdamW``."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

import tritonfp8
from bench.distributed.trainer import Program, Tokens, model_of
from tritonfp8.layers.stored import is_stored, plain_weight
from tritonfp8.optim import AdamW

STEPS = 4


def values(model):
    return {name: plain_weight(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def train(recipe, folder, steps=STEPS, resume=False):
    """The model, its values before and after, and the loss of each step."""
    model = model_of(Program(layers=1, hidden=64, tokens=16, dtype="float32"))
    tritonfp8.convert(model, recipe, weight_storage="quantized")
    before = values(model)
    arguments = TrainingArguments(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=2, lr_scheduler_type="constant",
        save_strategy="steps", save_steps=STEPS // 2, logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True,
        seed=0,
    )  # fmt: skip
    optimizer = AdamW(model.parameters(), lr=1e-3, moments="bf16")
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens(2 * STEPS, 16), optimizers=(optimizer, None))
    trainer.train(resume_from_checkpoint=resume or None)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return model, before, values(model), losses


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_every_weight_trains_and_a_resumed_run_ends_as_one_that_was_not_stopped(recipe, tmp_path):
    model, before, whole, losses = train(recipe, tmp_path / "whole")
    assert sum(map(is_stored, model.modules())) == 7
    assert [name for name in before if torch.equal(before[name], whole[name])] == []
    assert len(set(losses)) == STEPS
    train(recipe, tmp_path / "halves", steps=STEPS // 2)
    *_, resumed, again = train(recipe, tmp_path / "halves", resume=True)
    assert again == losses
    for name, expected in whole.items():
        assert torch.equal(resumed[name], expected), name
