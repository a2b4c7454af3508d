"""Trainers of TRL with Float8Callback."""

import datasets
import pytest
import torch
from callback_cases import llama, weights
from cases import each_recipe
from datasets.table import InMemoryTable
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tritonfp8 import Float8Linear, convert
from tritonfp8.integrations.transformers import Float8Callback

VOCABULARY = {**{chr(97 + i): i for i in range(26)}, "<pad>": 26, "<eos>": 27, "<unk>": 28}


def tokens():
    rows = torch.randint(26, (16, 12), generator=torch.Generator().manual_seed(0)).tolist()
    # With a fingerprint of its own: the one that datasets makes needs dill to pickle the types of pyarrow.
    return datasets.Dataset(InMemoryTable.from_pydict({"input_ids": rows}), fingerprint="tokens")


def tokenizer():
    found = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=found, **names)


def model():
    return llama(32, pad_token_id=26, eos_token_id=27, bos_token_id=27, use_cache=True)


def options(tmp_path):
    return {
        "output_dir": str(tmp_path), "max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2,
        "bf16": False, "report_to": [], "use_cpu": True, "logging_steps": 1, "disable_tqdm": True,
        "save_strategy": "no",
    }  # fmt: skip


def sources(data):
    return {"train_dataset": data, "processing_class": tokenizer()}


def check_trained(trainer, before, recipe, recwarn):
    layers = [module for module in trainer.model.modules() if isinstance(module, Float8Linear)]
    assert {layer.recipe.name for layer in layers} == {recipe}
    assert len(layers) == 2 * 7
    assert not [name for name, p in trainer.model.named_parameters() if torch.equal(p, before[name])]
    assert not [each for each in recwarn if "trainable weights moved" in str(each.message)]


@pytest.mark.one_in(6)
@each_recipe
def test_supervised_fine_tuning_moves_every_weight(tmp_path, recwarn, recipe):
    policy = model()
    before = weights(policy)
    args = SFTConfig(**options(tmp_path), dataset_kwargs={"skip_prepare_dataset": True})
    trainer = SFTTrainer(policy, args, **sources(tokens()), callbacks=[Float8Callback(recipe)])
    trainer.train()
    check_trained(trainer, before, recipe, recwarn)


def direct_preferences(policy, tmp_path, callback):
    rows = {"prompt": ["abc", "bcd"] * 4, "chosen": ["xyz", "zxy"] * 4, "rejected": ["aaa", "bbb"] * 4}
    data = datasets.Dataset.from_dict(rows)
    return DPOTrainer(policy, args=DPOConfig(**options(tmp_path)), **sources(data), callbacks=[callback])


def relative_policy(policy, tmp_path, callback):
    data = datasets.Dataset.from_dict({"prompt": ["abc", "bcd"] * 4})

    def letters(completions, **columns):
        return [float(len(set(each))) for each in completions]

    args = GRPOConfig(**options(tmp_path), num_generations=2, max_completion_length=6, beta=0.1)
    return GRPOTrainer(policy, letters, args=args, **sources(data), callbacks=[callback])


# Stored weights of bf16 are an error, and stored weights of tensorwise have scales of their own.
MODES = {"bf16": "training", "tensorwise": "training"}


@pytest.mark.one_in(12)
@pytest.mark.parametrize("make", [direct_preferences, relative_policy])
@each_recipe
def test_a_policy_and_its_reference(tmp_path, recwarn, make, recipe):
    """The reference stays in high precision; converted, too, it has the values of the policy before the first step."""
    model().save_pretrained(tmp_path / "model")
    found = {}
    for converts_reference in (False, True):
        # The path is where TRL finds the weights of the reference.
        policy = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        before = weights(policy)
        trainer = make(policy, tmp_path, Float8Callback(recipe))
        assert not any(isinstance(module, Float8Linear) for module in trainer.ref_model.modules())
        if converts_reference:
            convert(trainer.ref_model, recipe, mode=MODES.get(recipe, "inference"))
        trainer.train()
        check_trained(trainer, before, recipe, recwarn)
        first = next(row for row in trainer.state.log_history if "loss" in row)
        found[converts_reference] = first.get("rewards/margins", first.get("kl"))
    assert found[True] == 0
    assert (found[False] == 0) == (recipe == "bf16")
